"""`config.json` of published models as they are written, and what becomes of files that are more
than that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.config.compose.composer import compose
from mtrain.errors import ConfigError
from mtrain.plan.count import parameters
from mtrain.recipes.huggingface.exporter import config_json, same_model
from mtrain.recipes.huggingface.importer import import_config, kind_of
from tests.support.tables import tables

TABLES = tables("recipe_hf")

LLAMA3 = TABLES["llama3"]
DEEPSEEK: dict[str, Any] = TABLES["deepseek"]


def write(folder: Path, values: Any) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    file = folder / "model/config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return file


def test_hf_llama3_8b_equals_shipped(tmp_path: Path) -> None:
    found = import_config(write(tmp_path, LLAMA3))
    shipped = compose(["model=llama3_8b"]).run.model
    assert found.run.model == shipped.model_copy(update={"name": "model"})
    assert [(u.flag, u.why) for u in found.unplaced] == [("torch_dtype", "derived here")]


def test_hf_window_of_all_positions_is_none(tmp_path: Path) -> None:
    def window(**values: Any) -> tuple[int | None, list[str]]:
        found = import_config(write(tmp_path, {**LLAMA3, "model_type": "mistral", **values}))
        return found.run.model.window_size, [u.flag for u in found.unplaced if u.why == "no effect"]

    assert window(sliding_window=8191) == (8191, [])
    assert (
        window(sliding_window=8192) == window(sliding_window=262144) == (None, ["sliding_window"])
    )
    assert window(max_position_embeddings=1024) == (None, []), "no file says the 4,096 of the class"
    model = import_config(write(tmp_path, LLAMA3)).run.model
    wide, narrow = (model.model_copy(update={"window_size": width}) for width in (8192, 4096))
    assert same_model(model, wide) == []
    assert same_model(model, narrow) == ["window_size"]
    assert config_json(wide, "bfloat16")["model_type"] == "llama"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "bert", "vocab_size": 300, "hidden_dropout_prob": []}, "a wrong type"),
        ({"model_type": "llava", "text_config": 5}, "text_config is no object"),
        (
            {"model_type": "llava", "vision_config": [["hidden_size", 64]]},
            "vision_config is no object",
        ),
        ({"model_type": "mamba2", "time_step_limit": []}, "out of range"),
        ({"model_type": "granitemoehybrid", "time_step_limit": {}}, "a wrong type"),
        (
            {"model_type": "granitemoehybrid", "mamba_expand": "2", "hidden_size": 1 << 26},
            "mamba_expand is not a number",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_d_head": "64", "mamba_n_heads": 1 << 26},
            "is not a number",
        ),
        (
            {**DEEPSEEK, "n_shared_experts": "1", "moe_intermediate_size": 1 << 26},
            "n_shared_experts is not a number",
        ),
    ],
)
def test_hf_wrong_type_is_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        import_config(write(tmp_path, values))


def test_hf_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    file = write(tmp_path, {**DEEPSEEK, "model_type": "kimi_k2"})
    assert import_config(file).run == import_config(write(tmp_path, DEEPSEEK)).run
    assert kind_of({"model_type": "kimi_k2"}) == "deepseek_v3"
    assert kind_of({"model_type": "llama"}) == "llama"
    assert kind_of({"model_type": 3}) == kind_of({}) == ""


def test_hf_other_family_is_not_written() -> None:
    model = compose(["model=llama_tiny"]).run.model
    with pytest.raises(ConfigError, match=r"t5: model\.family is gpt, and not t5"):
        config_json(model, "float32", "t5")


def test_hf_granite_without_shared_experts_is_refused() -> None:
    model = compose(["model=granite4_h_tiny"]).run.model
    assert config_json(model, "float32")["shared_intermediate_size"] == 1024
    assert model.moe is not None
    moe = model.moe.model_copy(update={"shared_expert_intermediate_size": None})
    with pytest.raises(ConfigError, match="granitemoehybrid: it has no shared experts"):
        config_json(model.model_copy(update={"moe": moe}), "float32", "granitemoehybrid")


def test_hf_deepseek_v3_has_671b_parameters(tmp_path: Path) -> None:
    found = import_config(write(tmp_path, DEEPSEEK))
    m = found.run.model
    assert m.mla is not None
    assert m.moe is not None
    assert (m.mla.rope_type, m.mla.rotary_scaling_factor, m.mla.mscale_all_dim) == (
        "yarn",
        40.0,
        1.0,
    )
    assert (
        m.moe.first_dense_layers,
        m.moe.shared_expert_intermediate_size,
        m.moe.router_num_groups,
    ) == (3, 2048, 8)
    assert (m.moe.router_enable_expert_bias, m.moe.router_score_function, m.mtp_num_layers) == (
        True,
        "sigmoid",
        1,
    )
    assert m.qk_layernorm
    without = m.model_copy(update={"mtp_num_layers": None})
    assert parameters(without) / 1e9 == pytest.approx(671.03, rel=1e-3)
    assert found.unplaced == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (None, "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", None),
    ],
)
def test_hf_gpt2_names_its_gelu(theirs: str | None, ours: str | None, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}
    found = import_config(
        write(tmp_path, values | ({"activation_function": theirs} if theirs else {}))
    )
    m = found.run.model
    assert (m.ffn_hidden_size, m.vocab_size, m.tie_word_embeddings, m.add_bias_linear) == (
        3072,
        50257,
        True,
        True,
    )
    assert m.mask_padded_vocab, "there is no padding in the softmax of transformers"
    assert (m.attention_dropout, m.hidden_dropout, m.position_embedding_type) == (
        0.1,
        0.1,
        "learned_absolute",
    )
    assert [(u.flag, u.why) for u in found.unplaced] == (
        [] if ours else [("activation_function", "not supported")]
    )
    assert ours in (None, m.activation)


def test_hf_pythia_has_parallel_residual(tmp_path: Path) -> None:
    values = {
        "model_type": "gpt_neox",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 2048,
        "vocab_size": 50304,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    }
    found = import_config(write(tmp_path, values))
    assert found.run.model.rotary_percent == 0.25
    assert found.run.model.parallel_residual
    assert not found.unplaced


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["LlamaForCausalLM"], "no effect"),
        (["EvilForCausalLM"], "not supported"),
        ([], "not supported"),
    ],
)
def test_hf_remote_code_is_ignored(names: list[str], why: str, tmp_path: Path) -> None:
    said = {
        **LLAMA3,
        "auto_map": {"AutoModelForCausalLM": "modeling.Theirs"},
        "architectures": names,
    }
    found = import_config(write(tmp_path, said))
    assert [u.why for u in found.unplaced if u.flag == "auto_map"] == [why]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [2.0]}}, "rope_scaling"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"never_heard_of": 1}, "never_heard_of"),
    ],
)
def test_hf_unsupported_values_are_listed(
    change: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    found = import_config(write(tmp_path, {**LLAMA3, **change}))
    assert flag in {u.flag for u in found.unplaced}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[1]", "MT003"),
        ("{", "MT003"),
        ('{"a": 1, "a": 2}', "MT004"),
        ('{"model_type": "llama", "a": ' + "[" * 60 + "]" * 60 + "}", "MT005"),
        ("[" * 100_000 + "]" * 100_000, "MT003"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "MT005"),
        ('{"model_type": "mamba"}', "MT703"),
        ('{"model_type": ["llama"]}', "MT703"),
        ('{"model_type": "llama"}', "MT015"),
        (json.dumps({**LLAMA3, "hidden_size": "4096"}), "MT013"),
        (json.dumps({**LLAMA3, "rope_theta": "big"}), "MT703"),
        (json.dumps({**LLAMA3, "num_hidden_layers": -1}), "MT014"),
        (json.dumps({**LLAMA3, "hidden_size": True}), "MT013"),
        ('{"a": "\u202e"}', "MT003"),
        ('{"model_type": "llama", "\\u001b[31m": 1}', "MT003"),
    ],
)
def test_hf_non_config_is_refused(text: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_config(write(tmp_path, text))
    assert code in {p.code for p in caught.value.problems}


def test_hf_overrides_beat_the_file(tmp_path: Path) -> None:
    found = import_config(
        write(tmp_path, LLAMA3), ["parallel=tp2", "model.num_layers=2", "precision=bf16"]
    )
    assert (found.run.parallel.tp, found.run.model.num_layers, found.run.precision.dtype) == (
        2,
        2,
        "bf16",
    )
