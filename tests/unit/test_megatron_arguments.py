"""Arguments that a checkpoint of Megatron-LM keeps, beside the model that its weights are read as."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.compose import compose
from mtrain.config.paths import choices_of_group
from mtrain.config.resolve import resolve
from mtrain.config.run import RunConfig
from mtrain.convert import megatron_args
from mtrain.models.registry import family_of
from mtrain.recipes.flags_other import OTHERS
from mtrain.recipes.imported import read_flags
from tests.support.configs import LAPTOP
from tests.support.covering import some


def of_model(name: str, *words: str) -> RunConfig:
    """A resolved run of a shipped model."""
    return resolve(compose([f"model={name}", "data=mock", "parallel=single", *words]).run, LAPTOP)


def apart(run: RunConfig, **changed: Any) -> dict[str, Any]:
    """What arguments of an export that were changed differ in: the value that they say, by our key."""
    from mtrain.convert.megatron_compared import differing

    return {one.key or one.name: one.becomes for one in differing(megatron_args.arguments_of(run) | changed, run)}


def is_megatron(name: str) -> bool:
    """Whether checkpoints of megatron-core have its weights."""
    model = of_model(name).model
    return family_of(model).megatron_names and model.dsa is None and model.linear_attention is None


TINY = ("llama_tiny", "mixtral_tiny", "deepseek_tiny", "gpt_oss_tiny", "glm45_tiny", "gpt2", "gemma_tiny")


@pytest.mark.parametrize("name", some(choices_of_group("model"), TINY))
def test_an_export_is_of_the_model_that_it_was_made_of(name: str) -> None:
    if is_megatron(name):
        assert apart(of_model(name)) == {}


CHANGED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope scaling": (
        "llama_tiny",
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        {"model.rope_scaling_factor": 8.0},
    ),
    "activation": ("llama_tiny", {"swiglu": False, "quick_geglu": True}, {"model.activation": "quick_geglu"}),
    "no gate": ("llama_tiny", {"swiglu": False, "squared_relu": True}, {"model.activation": "squared_relu"}),
    "window": ("llama_tiny", {"window_size": [15, 0]}, {"model.window_size": 16}),
    "window as a pair": ("llama_tiny", {"window_size": (15, 0)}, {"model.window_size": 16}),
    "interleaved": ("llama_tiny", {"rotary_interleaved": True}, {"model.rotary_interleaved": True}),
    "layernorm 1p": ("llama_tiny", {"apply_layernorm_1p": True}, {"model.layernorm_zero_centered_gamma": True}),
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
    "clamp": ("llama_tiny", {"activation_func_clamp_value": 7.0}, {"model.activation_func_clamp_value": 7.0}),
    "heads": ("llama_tiny", {"num_attention_heads": 4, "kv_channels": 64}, {"model.num_attention_heads": 4}),
    "top-k": ("mixtral_tiny", {"moe_router_topk": 1}, {"model.moe.router_topk": 1}),
    "scores": (
        "mixtral_tiny",
        {"moe_router_score_function": "sigmoid"},
        {"model.moe.router_score_function": "sigmoid"},
    ),
    "softmax before": ("mixtral_tiny", {"moe_router_pre_softmax": True}, {"model.moe.router_pre_softmax": True}),
    "factor of scores": (
        "mixtral_tiny",
        {"moe_router_topk_scaling_factor": 2.5},
        {"model.moe.router_topk_scaling_factor": 2.5},
    ),
    "dense layers": ("mixtral_tiny", {"moe_layer_freq": [0, 1, 1, 1]}, {"model.moe.first_dense_layers": 1}),
    "capacity": ("mixtral_tiny", {"moe_expert_capacity_factor": 1.0}, {"model.moe.expert_capacity_factor": 1.0}),
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
def test_an_argument_that_changes_the_numbers_is_named_with_its_key(name: str) -> None:
    model, changed, expected = CHANGED[name]
    found = apart(of_model(model), **changed)
    assert found.items() >= expected.items(), found


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_dropout": 0.3, "attention_dropout": 0.3, "init_method_std": 0.5},
        {"micro_batch_size": 7, "lr": 0.1, "apply_query_key_layer_scaling": True, "fp32_residual_connection": True},
        {"relative_attention_num_buckets": 32, "mamba_state_dim": 128, "hybrid_attention_ratio": 0.0},
        {"rope_scaling_factor": 8.0, "use_rope_scaling": False},
        {"use_rotary_position_embeddings": True},
    ],
)
def test_what_changes_no_number_of_the_network_is_no_difference(changed: dict[str, Any]) -> None:
    assert apart(of_model("llama_tiny"), **changed) == {}


def test_every_flag_of_a_model_is_among_the_arguments_of_an_export() -> None:
    from mtrain.convert.megatron_compared import argument_of

    kept = megatron_args.arguments_of(of_model("llama_tiny"))
    for flag in ("--rotary-interleaved", "--window-size", "--apply-layernorm-1p", "--moe-router-num-groups"):
        assert argument_of(flag) in kept
        assert flag not in OTHERS


def test_arguments_of_an_older_export_say_what_is_among_them() -> None:
    from mtrain.convert.megatron_compared import differing

    run = of_model("gpt2")
    older = {"num_layers": 12, "swiglu": False, "rotary_base": 10000, "add_bias_linear": None}
    assert differing(older, run) == []
    assert [one.key for one in differing(older | {"num_layers": 13, "swiglu": True}, run)] == [
        "model.num_layers",
        "model.activation",
    ]


def test_flags_that_an_export_of_a_run_writes_are_read_as_its_model() -> None:
    from mtrain.convert.megatron_compared import _words_kept

    run = of_model("gpt_oss_tiny")
    _, said, _ = read_flags(_words_kept(megatron_args.arguments_of(run)), None)
    assert said["model.window_size"] == run.model.window_size
    assert said["model.moe.router_topk"] == run.model.moe.router_topk  # type: ignore[union-attr]
