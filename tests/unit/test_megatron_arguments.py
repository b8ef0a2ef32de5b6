"""Arguments in a checkpoint of Megatron-LM, compared with the model that its weights are read
as.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.convert.megatron import arguments_compared
from mtrain.models.registry import family_of
from mtrain.recipes.megatron.flags_unmapped import OTHERS
from mtrain.recipes.megatron.reading import read_flags
from tests.support.configs import LAPTOP
from tests.support.covering import some
from tests.support.tables import tables

TABLES = tables("megatron_arguments")


@cache
def of_model(name: str, *words: str) -> RunConfig:
    """Return a resolved run of a shipped model."""
    return resolve(compose([f"model={name}", "data=mock", "parallel=single", *words]).run, LAPTOP)


def apart(run: RunConfig, **changed: Any) -> dict[str, Any]:
    """Return the differences after arguments of an export were changed: their values, by our
    key.
    """
    from mtrain.convert.megatron.arguments_compared import differing

    return {
        one.key or one.name: one.becomes
        for one in differing(arguments_compared.arguments_of(run) | changed, run)
    }


def is_megatron(name: str) -> bool:
    """Return whether checkpoints of megatron-core have its weights."""
    model = of_model(name).model
    return family_of(model).megatron_names and model.dsa is None and model.linear_attention is None


TINY = (
    "llama_tiny",
    "mixtral_tiny",
    "deepseek_tiny",
    "gpt_oss_tiny",
    "glm45_tiny",
    "gpt2",
    "gemma_tiny",
)


@pytest.mark.parametrize("name", some(choices_of_group("model"), TINY))
def test_megatron_arguments_export_belongs_to_its_model(name: str) -> None:
    if is_megatron(name):
        assert apart(of_model(name)) == {}


CHANGED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope scaling": (
        "llama_tiny",
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        {"model.rope_scaling_factor": 8.0},
    ),
    "activation": (
        "llama_tiny",
        {"swiglu": False, "quick_geglu": True},
        {"model.activation": "quick_geglu"},
    ),
    "no gate": (
        "llama_tiny",
        {"swiglu": False, "squared_relu": True},
        {"model.activation": "squared_relu"},
    ),
    "window": ("llama_tiny", {"window_size": [15, 0]}, {"model.window_size": 16}),
    "window as a pair": ("llama_tiny", {"window_size": (15, 0)}, {"model.window_size": 16}),
    "window to both sides": ("llama_tiny", {"window_size": [15, 15]}, {"model.window_size": 16}),
    "window to both sides of other widths": (
        "llama_tiny",
        {"window_size": (15, 5)},
        {"model.window_size": 16},
    ),
    "window without an end to the right": (
        "llama_tiny",
        {"window_size": (15, -1)},
        {"model.window_size": 16},
    ),
    "window of one token": ("llama_tiny", {"window_size": (0, 0)}, {"window_size": None}),
    "window of a word": ("llama_tiny", {"window_size": "wide"}, {"window_size": None}),
    "interleaved": ("llama_tiny", {"rotary_interleaved": True}, {"model.rotary_interleaved": True}),
    "layernorm 1p": (
        "llama_tiny",
        {"apply_layernorm_1p": True},
        {"model.layernorm_zero_centered_gamma": True},
    ),
    "epsilon": ("llama_tiny", {"norm_epsilon": 1e-3}, {"model.layernorm_epsilon": 1e-3}),
    "norms of queries": ("llama_tiny", {"qk_l2_norm": True}, {"model.qk_l2_norm": True}),
    "share": ("llama_tiny", {"rotary_percent": 0.5}, {"model.rotary_percent": 0.5}),
    "base": ("llama_tiny", {"rotary_base": 500000}, {"model.rotary_base": 500000}),
    "interpolation": (
        "llama_tiny",
        {"rotary_seq_len_interpolation_factor": 4},
        {"model.rotary_seq_len_interpolation_factor": 4},
    ),
    "layers without positions": ("llama_tiny", {"no_rope_freq": 4}, {"model.no_rope_freq": 4}),
    "softmax": ("llama_tiny", {"softmax_type": "off-by-one"}, {"model.softmax_type": "off-by-one"}),
    "clamp": (
        "llama_tiny",
        {"activation_func_clamp_value": 7.0},
        {"model.activation_func_clamp_value": 7.0},
    ),
    "heads": (
        "llama_tiny",
        {"num_attention_heads": 4, "kv_channels": 64},
        {"model.num_attention_heads": 4},
    ),
    "top-k": ("mixtral_tiny", {"moe_router_topk": 1}, {"model.moe.router_topk": 1}),
    "scores": (
        "mixtral_tiny",
        {"moe_router_score_function": "sigmoid"},
        {"model.moe.router_score_function": "sigmoid"},
    ),
    "softmax before": (
        "mixtral_tiny",
        {"moe_router_pre_softmax": True},
        {"model.moe.router_pre_softmax": True},
    ),
    "factor of scores": (
        "mixtral_tiny",
        {"moe_router_topk_scaling_factor": 2.5},
        {"model.moe.router_topk_scaling_factor": 2.5},
    ),
    "scores that none has": (
        "mixtral_tiny",
        {"moe_router_score_function": "sqrtsoftplus"},
        {"moe_router_score_function": None},
    ),
    "sinkhorn": (
        "mixtral_tiny",
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"model.moe.router_load_balancing_type": "sinkhorn"},
    ),
    "dense layers": (
        "mixtral_tiny",
        {"moe_layer_freq": [0, 1, 1, 1]},
        {"model.moe.first_dense_layers": 1},
    ),
    "capacity": (
        "mixtral_tiny",
        {"moe_expert_capacity_factor": 1.0},
        {"model.moe.expert_capacity_factor": 1.0},
    ),
    "no experts": ("mixtral_tiny", {"num_experts": None}, {"model.moe.num_experts": None}),
    "groups": ("deepseek_tiny", {"moe_router_group_topk": 1}, {"model.moe.router_group_topk": 1}),
    "yarn": ("deepseek_tiny", {"rope_type": "yarn"}, {"model.mla.rope_type": "yarn"}),
    "a field without a flag": ("deepseek_tiny", {"beta_fast": 10}, {"model.mla.beta_fast": 10}),
    "exact gelu": ("gpt2", {"bias_gelu_fusion": False}, {"model.activation": "gelu"}),
    "a part that none has": (
        "llama_tiny",
        {"apply_residual_connection_post_layernorm": True},
        {"apply_residual_connection_post_layernorm": None},
    ),
    "positions that none has": (
        "llama_tiny",
        {"position_embedding_type": "mrope"},
        {"position_embedding_type": None},
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_megatron_arguments_number_change_is_named_with_key(name: str) -> None:
    model, changed, expected = CHANGED[name]
    found = apart(of_model(model), **changed)
    assert found.items() >= expected.items(), found


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_dropout": 0.3, "attention_dropout": 0.3, "init_method_std": 0.5},
        {
            "micro_batch_size": 7,
            "lr": 0.1,
            "apply_query_key_layer_scaling": True,
            "fp32_residual_connection": True,
        },
        {
            "relative_attention_num_buckets": 32,
            "mamba_state_dim": 128,
            "hybrid_attention_ratio": 0.0,
        },
        {"rope_scaling_factor": 8.0, "use_rope_scaling": False},
        {"use_rotary_position_embeddings": True},
        {"window_size": (-1, -1)},
        {"window_size": [-1, 0]},
    ],
)
def test_megatron_arguments_harmless_change_is_no_difference(changed: dict[str, Any]) -> None:
    assert apart(of_model("llama_tiny"), **changed) == {}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
IN_YARN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = TABLES["in_yarn"]


@pytest.mark.parametrize("name", IN_YARN)
def test_megatron_arguments_yarn_is_compared_with_model_scaling(name: str) -> None:
    changed, expected = IN_YARN[name]
    assert apart(of_model("gpt_oss_tiny"), **changed) == expected


def test_megatron_arguments_yarn_weight_is_a_cosine_factor() -> None:
    found = apart(of_model("gpt_oss_tiny"), mscale=0.5)
    assert found == {"model.rope_scaling.attention_factor": pytest.approx(0.05 * math.log(8) + 1)}


def test_megatron_arguments_export_states_yarn_or_its_lack() -> None:
    kept = arguments_compared.arguments_of(of_model("gpt_oss_tiny"))
    assert kept["position_embedding_type"] == "yarn"
    assert kept["rotary_scaling_factor"] == 8.0
    assert kept["yarn_original_max_position_embeddings"] == 128
    for scaling in (
        "{rope_type:yarn,factor:4.0,attention_factor:1.3}",
        "{rope_type:yarn,factor:4.0,mscale:0.7,mscale_all_dim:1.0}",
        "{rope_type:dynamic,factor:4.0}",
    ):
        assert apart(of_model("llama_tiny", f"model.rope_scaling={scaling}")) == {}


def test_megatron_arguments_missing_yarn_is_reported() -> None:
    from mtrain.convert.megatron.arguments_compared import differing

    plain = of_model("gpt_oss_tiny", "model.rope_scaling=null")
    kept = of_model("gpt_oss_tiny")
    (one,) = differing(arguments_compared.arguments_of(kept), plain)
    assert (one.key, one.becomes) == ("model.rope_scaling", YARN)
    assert apart(plain, position_embedding_type="yarn") == {"position_embedding_type": None}
    assert apart(of_model("deepseek_tiny"), position_embedding_type="yarn") == {}


WITHOUT_FLAGS = {
    "model.rope_scaling": "{rope_type:llama3,factor:8.0}",
    "model.softmax_scale": "0.3",
    "model.final_logit_softcapping": "30",
    "model.attn_logit_softcapping": "50",
    "model.parallel_residual": "true",
    "model.scale_embedding": "true",
    "model.norm_placement": "post",
    "model.add_mlp_bias": "true",
}


@pytest.mark.parametrize("key", WITHOUT_FLAGS)
def test_megatron_arguments_key_without_flag_is_not_computed(key: str) -> None:
    from mtrain.convert.megatron.arguments_compared import differing, megatron_arguments

    plain = of_model("llama_tiny")
    run = of_model("llama_tiny", f"{key}={WITHOUT_FLAGS[key]}")
    theirs = {f"an_argument_of_theirs_{i}": None for i in range(200)} | megatron_arguments(plain)
    for kept in (arguments_compared.arguments_of(plain), theirs):
        (one,) = differing(kept, run)
        assert one.key == key
        assert one.becomes in (None, False, "pre")
        assert differing(kept, plain) == []
    (one,) = differing(arguments_compared.arguments_of(run), plain)
    assert one.key == key
    assert differing(arguments_compared.arguments_of(run), run) == []


def test_megatron_arguments_key_without_argument_is_reported() -> None:
    from mtrain.cli.convert_megatron import _apart
    from mtrain.convert.megatron.arguments_compared import differing

    theirs: dict[str, Any] = {f"an_argument_of_theirs_{i}": None for i in range(250)}
    (one,) = differing(
        theirs | {"num_layers": 4}, of_model("llama_tiny", "model.final_logit_softcapping=30")
    )[-1:]
    problem = _apart(one, Path("common.pt"), "")
    assert problem.detail == "common.pt was written by Megatron-LM, which has no argument for it"
    assert problem.fix == "model.final_logit_softcapping=null"


def test_megatron_arguments_default_for_null_is_no_difference() -> None:
    width = of_model("llama_tiny").model.head_dim
    plain = of_model("llama_tiny")
    said = of_model("llama_tiny", f"model.softmax_scale={1 / math.sqrt(width)}")
    from mtrain.convert.megatron.arguments_compared import differing

    assert differing(arguments_compared.arguments_of(plain), said) == []


def test_megatron_arguments_foreign_balancing_reports_sinkhorn() -> None:
    words = ("router_load_balancing_type=sinkhorn", "aux_loss_coeff=0", "router_pre_softmax=true")
    run = of_model("mixtral_tiny", *(f"model.moe.{word}" for word in words))
    assert apart(run) == {}
    key = "model.moe.router_load_balancing_type"
    assert apart(run, moe_router_load_balancing_type="none") == {key: "none"}
    for other in ("seq_aux_loss", "global_aux_loss", ["aux_loss", "seq_aux_loss"]):
        assert apart(of_model("mixtral_tiny"), moe_router_load_balancing_type=other) == {}


@pytest.mark.parametrize(
    ("word", "width", "refused"),
    [
        ("127,0", 128, ""),
        ("127,127", 128, ""),
        ("(127, -1)", 128, ""),
        ("-1,0", None, ""),
        ("0,0", None, "changes the numbers"),
        ("128", None, "takes tokens"),
    ],
)
def test_megatron_arguments_causal_window_is_compared_by_effect(
    word: str, width: int | None, refused: str
) -> None:
    a, said, _ = read_flags(["--window-size", word], None)
    assert said["model.window_size"] == width
    assert [one.text.startswith(refused) for one in a.unplaced.values()] == (
        [True] if refused else []
    )


def test_megatron_arguments_model_flags_are_in_export() -> None:
    from mtrain.convert.megatron.arguments_compared import argument_of

    kept = arguments_compared.arguments_of(of_model("llama_tiny"))
    for flag in (
        "--rotary-interleaved",
        "--window-size",
        "--apply-layernorm-1p",
        "--moe-router-num-groups",
    ):
        assert argument_of(flag) in kept
        assert flag not in OTHERS


def test_megatron_arguments_older_export_states_its_arguments() -> None:
    from mtrain.convert.megatron.arguments_compared import differing

    run = of_model("gpt2")
    older = {"num_layers": 12, "swiglu": False, "rotary_base": 10000, "add_bias_linear": None}
    assert differing(older, run) == []
    assert [one.key for one in differing(older | {"num_layers": 13, "swiglu": True}, run)] == [
        "model.num_layers",
        "model.activation",
    ]


def test_megatron_arguments_run_export_reads_back_as_model() -> None:
    from mtrain.convert.megatron.arguments_compared import _words_kept

    run = of_model("gpt_oss_tiny")
    _, said, _ = read_flags(_words_kept(arguments_compared.arguments_of(run)), None)
    assert said["model.window_size"] == run.model.window_size
    assert said["model.moe.router_topk"] == run.model.moe.router_topk  # type: ignore[union-attr]
