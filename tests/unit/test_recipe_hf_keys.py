"""Every key of a `config.json` that transformers writes is used, irrelevant by name for a reason,
or refused.
"""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mtrain.errors import ConfigError
from mtrain.recipes.huggingface.config_file import ELSEWHERE, IRRELEVANT
from mtrain.recipes.huggingface.importer import DECODERS, KINDS, import_config
from mtrain.recipes.imported import Imported
from tests.support.tables import tables

TABLES = tables("recipe_hf_keys")

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 300,
    "num_experts_per_tok": 2,
}
T5_SHAPE = ("d_model", "num_layers", "num_decoder_layers")
MAMBA2 = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "vocab_size": 300,
}
GPT2 = {"n_layer": 4, "n_embd": 64, "n_head": 8, "vocab_size": 300}
OTHER_SHAPES = {"gpt2": GPT2, "mamba2": MAMBA2}
NESTED = {
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
}
NESTED |= {
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "type",
}
NESTED |= {"original_max_position_embeddings"}
ROPE: list[dict[str, Any]] = TABLES["rope"]
"""Values that mean nothing for a model without the part, and those that a class computes from other
keys.
"""


def defaults(kind: str) -> dict[str, Any]:
    """Return every key of a family: those of a default configuration, those annotated in its class,
    and those read under another name.
    """
    of_class = transformers.CONFIG_MAPPING[kind]
    shape = OTHER_SHAPES.get(kind) or {k: v for k, v in SHAPE.items() if hasattr(of_class(), k)}
    values = json.loads(json.dumps(of_class(**shape).to_dict()))
    noted = {name for base in of_class.__mro__ for name in getattr(base, "__annotations__", {})}
    plans = {
        name
        for name in noted
        if name.startswith(("_", "base_", "extra_")) or name.endswith(("_map", "_defaults"))
    }
    return {**dict.fromkeys(noted - plans - of_class.attribute_map.keys()), **values}


def read(folder: Path, values: dict[str, Any]) -> Imported:
    return _read(folder / "config.json", json.dumps(values))


@cache
def _read(file: Path, text: str) -> Imported:
    # each changed key is compared with the same base
    file.write_text(text)
    return import_config(file)


def flags(found: Imported) -> set[str]:
    return {u.flag for u in found.unplaced}


def another(value: Any) -> Any:
    """Return a different value of the same type, or a number for null."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        if value:
            return [
                {"full_attention": "sliding_attention"}.get(value[0], "full_attention"),
                *value[1:],
            ]
        return [0]
    return "another" if isinstance(value, str) else 7


def account(folder: Path, base: dict[str, Any], changed: dict[str, Any], key: str) -> str | None:
    """Return the outcome for a key whose value differs from that in `base`; None: it was silently
    dropped.
    """
    try:
        found = read(folder, changed)
    except ConfigError as refused:
        return f"refused: {refused}"
    if key in flags(found) and key not in ("rope_parameters", "rope_scaling"):
        return "listed"
    if any("rotary positions of kind" in u.text for u in found.unplaced):
        return "listed, with all keys next to it"
    before = read(folder, base)
    return (
        "used, or listed" if (found.run, found.unplaced) != (before.run, before.unplaced) else None
    )


@pytest.mark.sampled(27)
@pytest.mark.parametrize("kind", KINDS)
def test_hf_keys_class_key_is_never_dropped_silently(kind: str, tmp_path: Path) -> None:
    base = defaults(kind)
    assert not {u.flag for u in read(tmp_path, base).unplaced if u.why == "unknown"}
    irrelevant = {**IRRELEVANT, **KINDS[kind].reads.irrelevant}
    silent = []
    for key, value in base.items():
        if key in irrelevant or key in ("model_type", "rope_parameters"):
            continue
        width = {"sliding_window": 16} if key == "use_sliding_window" else {}
        if account(tmp_path, base | width, {**base, **width, key: another(value)}, key) is None:
            silent.append(key)
    assert not silent
    assert all(irrelevant.values())


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("rope", ROPE, ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "deepseek_v3"])  # one of each reader of them
def test_hf_keys_rope_key_is_never_dropped_silently(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    """Use the spelling of transformers 5, and that of 4: `rope_theta` outside of `rope_scaling`."""
    base = {**defaults(kind), "rope_parameters": rope}
    for key in sorted(NESTED | {"never_heard_of"}):
        if key == "type":  # the name of rope_type in transformers 4
            continue
        value = another(rope.get(key))
        five = {**base, "rope_parameters": {**rope, key: value}}
        assert account(tmp_path, base, five, "rope_parameters"), f"rope_parameters.{key}"
        old = {k: v for k, v in base.items() if k != "rope_parameters"}
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        four = {**old, "rope_scaling": {**scaling, key: value}}
        assert account(tmp_path, {**old, "rope_scaling": scaling}, four, "rope_scaling"), (
            f"rope_scaling.{key}"
        )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rope", ROPE, ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind not in ("gpt2", "gemma3_text")])
def test_hf_keys_transformers_4_and_5_agree(
    kind: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    old = {k: v for k, v in defaults(kind).items() if k != "rope_parameters"}
    theta = {"rope_theta": 5000.0}
    found = read(tmp_path, {**old, "rope_parameters": {**rope, **theta}})
    scaling = {("type" if k == "rope_type" else k): v for k, v in rope.items() if k != "rope_theta"}
    base = "rotary_emb_base" if kind == "gpt_neox" else "rope_theta"
    four = read(tmp_path, {**old, base: 5000.0, "rope_scaling": scaling})
    assert found.run == four.run
    assert found.run.model.rotary_base == 5000.0
    layers = {name: {**rope, **theta} for name in ("full_attention", "sliding_attention")}
    assert read(tmp_path, {**old, "rope_parameters": layers}).run == found.run
    layers["full_attention"] = {**rope, "rope_theta": 7000.0}
    assert "rope_parameters" in flags(read(tmp_path, {**old, "rope_parameters": layers}))


@pytest.mark.parametrize("rope", ROPE, ids=lambda r: r["rope_type"])
def test_hf_keys_transformers_4_and_5_agree_on_two_bases(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    old = {k: v for k, v in defaults("gemma3_text").items() if k != "rope_parameters"}
    local = {"rope_type": "default", "rope_theta": 700.0}
    others = {**rope, "rope_theta": 5000.0}
    five = read(
        tmp_path, {**old, "rope_parameters": {"sliding_attention": local, "full_attention": others}}
    )
    scaling = {("type" if k == "rope_type" else k): v for k, v in rope.items() if k != "rope_theta"}
    four = {**old, "rope_theta": 5000.0, "rope_local_base_freq": 700.0, "rope_scaling": scaling}
    assert read(tmp_path, four).run == five.run
    assert (five.run.model.rotary_base, five.run.model.rotary_base_local) == (5000.0, 700.0)
    for odd in (
        {"rope_parameters": {**rope, "rope_theta": 5000.0}},
        {
            "rope_parameters": {
                "sliding_attention": {**local, "factor": 2.0},
                "full_attention": others,
            }
        },
        {"rope_parameters": {"full_attention": others}, "rope_scaling": scaling},
    ):
        assert "rope_parameters" in flags(read(tmp_path, {**old, **odd}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_hf_keys_missing_key_is_class_default(kind: str, tmp_path: Path) -> None:
    whole = defaults(kind)
    shape = OTHER_SHAPES.get(kind) or {k: whole[k] for k in (*SHAPE, *T5_SHAPE) if k in whole}
    found = read(tmp_path, {"model_type": kind, **shape})
    wanted = read(tmp_path, whole)
    head = {"kv_channels": None}  # a width that the class computes, said or not
    assert found.run.model.model_copy(update=head) == wanted.run.model.model_copy(update=head)
    assert found.run.model.head_dim == wanted.run.model.head_dim


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_hf_keys_alias_equals_key(kind: str, tmp_path: Path) -> None:
    base = defaults(kind)
    names = transformers.CONFIG_MAPPING[kind].attribute_map
    assert names.items() <= KINDS[kind].reads.aliases.items()
    for alias, key in names.items():
        if base.get(key) is None:
            continue
        moved = {k: v for k, v in base.items() if k != key} | {alias: base[key] * 2}
        assert read(tmp_path, moved).run == read(tmp_path, {**base, key: base[key] * 2}).run
        assert alias in flags(read(tmp_path, {**base, alias: base[key] * 2}))


@pytest.mark.parametrize(
    ("kind", "change", "flag"),
    TABLES["unsupported"],
)
def test_hf_keys_unsupported_is_named(
    kind: str, change: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    found = read(tmp_path, {"model_type": kind, **(GPT2 if kind == "gpt2" else SHAPE), **change})
    why = {u.flag: (u.why, u.text) for u in found.unplaced}
    assert flag in why
    if why[flag][1].startswith("changes the numbers"):
        assert flag in found.open["recipe.verified"], "no such recipe is called verified"
    if flag == "experts_per_token":
        assert found.run.model.moe is not None
        assert found.run.model.moe.router_topk == 4, "transformers does not read it"
    if change.keys() == {"num_hidden_layer"} or "factr" in change.get("rope_parameters", {}):
        assert why[flag][0] == "unknown"
        assert "did you mean" in why[flag][1]


@pytest.mark.parametrize(
    ("kind", "change", "wanted"),
    TABLES["supported"],
)
def test_hf_keys_supported_comes_over(
    kind: str, change: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, {"model_type": kind, **(GPT2 if kind == "gpt2" else SHAPE), **change})
    values = found.run.flat()
    assert {key: values[f"model.{key}"] for key in wanted} == wanted
    assert not flags(found) & change.keys() - {"topk_group", "n_group"} - ELSEWHERE.keys()


def test_hf_keys_unknown_keys_and_endless_layers_are_fast(
    tmp_path: Path,
) -> None:
    started = time.process_time()
    many = {f"never_heard_of_{i}": i for i in range(9_000)}
    assert len(read(tmp_path, {"model_type": "qwen3_moe", **SHAPE, **many}).unplaced) >= 9_000
    read(tmp_path, {"model_type": "qwen2", **SHAPE, "num_hidden_layers": 1 << 27})
    with pytest.raises(ConfigError, match="at most"):
        read(tmp_path, {"model_type": "qwen2", **SHAPE, "num_hidden_layers": 10**12})
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
        {
            "model_type": "deepseek_v3",
            "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0},
        },
        {"model_type": "mixtral", "router_aux_loss_coef": 10**400},
    ],
)
def test_hf_keys_non_numeric_is_refused(odd: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **odd}))
    with pytest.raises(ConfigError, match="a wrong type or size"):
        import_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear"}, [("rope_scaling", "unreadable")]),
        ({"rope_type": "llama3", "low_freq_factor": 1.0}, [("rope_scaling", "unreadable")]),
        ({"rope_type": "linear", "type": "llama3", "factor": 2.0}, [("rope_scaling", "no effect")]),
        ({"rope_type": "linear", "type": "linear", "factor": 2.0}, []),
    ],
)
def test_hf_keys_incomplete_rope_scaling_is_reported(
    rope: dict[str, Any], said: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", **SHAPE, "rope_scaling": rope})
    )
    found = import_config(tmp_path / "config.json")
    assert [(u.flag, u.why) for u in found.unplaced if u.flag == "rope_scaling"] == said
    scaled = (
        found.run.model.rope_scaling_factor or found.run.model.rotary_seq_len_interpolation_factor
    )
    assert (scaled is None) == ("factor" not in rope)
