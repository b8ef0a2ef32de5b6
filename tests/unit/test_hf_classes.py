"""Keys that transformers reads from a `config.json`, and their meaning of null: the table, and the
importer that follows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.recipes.huggingface import config_file
from mtrain.recipes.huggingface.exporter import differing
from mtrain.recipes.huggingface.importer import import_config
from tests.parity_hf.families import CASES, MOE, NEOX, PHI3, QWEN_MOE, SIZES, V2, V3
from tests.support import hf_classes as source

T5 = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
GRANITE = {
    **SIZES,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": "nope",
}
WINDOWS = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 7, "layer_types": WINDOWS}


def read(
    tmp_path: Path, kind: str, values: dict[str, Any]
) -> tuple[Any, list[str], dict[str, str]]:
    """Return the imported model, the refused keys, and the reason for each key that was left
    out.
    """
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **values}))
    found = import_config(file)
    return found.run.model, differing(found), {one.flag: one.why for one in found.unplaced}


def test_hf_classes_table_equals_transformers_source() -> None:
    version = json.loads(config_file.TABLE.read_text())["transformers"]
    if source.table()["transformers"] != version:
        pytest.skip(f"the table is of transformers {version}")
    assert source.text() == config_file.TABLE.read_text(), (
        "python -m tests.support.hf_classes writes it again"
    )


def test_hf_classes_new_key_makes_another_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = source.of_kind("mixtral")
    text = Path(source._class_of("mixtral")[0].parent / "modeling_mixtral.py").read_text()
    assert "layer_types" not in before["read"]
    changed = text.replace(
        "config.num_hidden_layers", "config.num_hidden_layers + len(config.layer_types)"
    )

    def read_text(path: Path) -> str:
        return changed if path.name == "modeling_mixtral.py" else path.read_bytes().decode()

    monkeypatch.setattr(Path, "read_text", read_text)
    assert "layer_types" in source.of_kind("mixtral")["read"]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mixtral", {**MOE, **WINDOW}),
        ("phi3", {**PHI3, **WINDOW}),
        ("qwen3_moe", {**QWEN_MOE, **WINDOW, "use_sliding_window": True}),
    ],
)
def test_hf_classes_unread_layer_kinds_leave_windows(
    kind: str, values: dict[str, Any], tmp_path: Path
) -> None:
    model, refused, why = read(tmp_path, kind, values)
    assert (model.window_size, model.window_attn_skip_freq, refused) == (7, None, [])
    assert why["layer_types"] == "no effect"
    plain, _, _ = read(
        tmp_path, kind, {key: value for key, value in values.items() if key != "layer_types"}
    )
    assert model == plain


def test_hf_classes_mixed_mistral_is_read_as_auto_config(
    tmp_path: Path,
) -> None:
    for kind in ("mistral", "ministral"):
        model, refused, _ = read(tmp_path, kind, {**SIZES, **WINDOW})
        assert (model.window_size, model.window_attn_skip_freq, refused) == (7, 2, [])


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        ("deepseek_v3", V3, "norm_topk_prob"),
        ("deepseek_v3", V3, "rope_interleave"),
        ("granitemoehybrid", GRANITE, "mamba_conv_bias"),
    ],
)
def test_hf_classes_null_taken_for_false_is_false(
    kind: str, values: dict[str, Any], key: str, tmp_path: Path
) -> None:
    for value in (None, False):
        _, refused, _ = read(tmp_path, kind, {**values, key: value})
        assert [text.partition(" ")[0] for text in refused] == [key]
    assert read(tmp_path, kind, {**values, key: True})[1] == []


def test_hf_classes_null_t5_leaves_logits_unscaled(tmp_path: Path) -> None:
    model, refused, _ = read(tmp_path, "t5", {**T5, "scale_decoder_outputs": None})
    assert (model.t5.scale_logits, refused) == (False, [])
    assert read(tmp_path, "t5", T5)[0].t5.scale_logits


def test_hf_classes_refused_null_is_named(tmp_path: Path) -> None:
    _, refused, why = read(tmp_path, "llama", {**SIZES, "attention_bias": None})
    assert why["attention_bias"] == "unreadable"
    assert "takes no null" in refused[0]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("deepseek_v3", {**V3, "sliding_window": 7, "final_logit_softcapping": 3.0}),
        ("gpt_neox", {**NEOX, "rope_theta": 7.0, "partial_rotary_factor": 0.5}),
        (
            "llama",
            {**SIZES, "sliding_window": 7, "layer_types": WINDOWS, "final_logit_softcapping": 3.0},
        ),
    ],
)
def test_hf_classes_unread_keys_are_dropped_with_note(
    kind: str, values: dict[str, Any], tmp_path: Path
) -> None:
    model, refused, why = read(tmp_path, kind, values)
    assert refused == []
    assert set(why.values()) >= {"no effect"}
    known = {key for key in values if why.get(key) != "no effect"}
    assert model == read(tmp_path, kind, {key: values[key] for key in known})[0]


def test_hf_classes_null_equal_to_default_is_absence(tmp_path: Path) -> None:
    values = {
        k: v for k, v in CASES["gpt oss beyond its window"].values.items() if k != "rope_parameters"
    }
    plain = read(tmp_path, "gpt_oss", values)[0]
    assert plain.rope_scaling.rope_type == "yarn"
    assert read(tmp_path, "gpt_oss", {**values, "rope_parameters": None})[0] == plain
    assert read(tmp_path, "gpt_oss", {**values, "rope_parameters": {}})[0].rope_scaling is None


def test_hf_classes_null_head_dim_is_derived(tmp_path: Path) -> None:
    values = {**CASES["minimax m2"].values, "rotary_dim": 8}
    assert read(tmp_path, "minimax_m2", values)[0].rotary_percent == 8 / values["head_dim"]
    assert (
        read(tmp_path, "minimax_m2", {**values, "partial_rotary_factor": None})[0].rotary_percent
        == 1.0
    )


def test_hf_classes_width_overriding_computed_is_refused(tmp_path: Path) -> None:
    width = V3["qk_rope_head_dim"]
    assert read(tmp_path, "deepseek_v3", {**V3, "head_dim": width})[1] == []
    for value in (1, None):
        assert "head_dim" in read(tmp_path, "deepseek_v3", {**V3, "head_dim": value})[1][0]


def test_hf_classes_one_expert_group_chooses_one(tmp_path: Path) -> None:
    values = {**CASES["deepseek v3"].values, "n_group": 1}
    assert read(tmp_path, "deepseek_v3", {**values, "topk_group": 1})[1] == []
    assert "topk_group" in read(tmp_path, "deepseek_v3", {**values, "topk_group": 0})[1][0]


def test_hf_classes_foreign_part_unread_by_class_is_refused(
    tmp_path: Path,
) -> None:
    for kind, values, key in (
        ("deepseek_v2", V2, "norm_topk_prob"),
        ("deepseek_v3", V3, "mlp_bias"),
        ("minimax_m2", CASES["minimax m2"].values, "shared_intermediate_size"),
    ):
        assert read(tmp_path, kind, {**values, key: True})[1][0].startswith(
            f"{key} = true: changes the numbers"
        )


def test_hf_classes_unknown_key_is_named(tmp_path: Path) -> None:
    assert "did you mean" in read(tmp_path, "llama", {**SIZES, "rms_norm_epss": 1e-6})[1][0]
