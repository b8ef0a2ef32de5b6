"""Published config.json of Nemotron and of Megatron's BERT, with keys that transformers does not
read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.recipes.huggingface.exporter import differing
from mtrain.recipes.huggingface.importer import import_config
from mtrain.recipes.imported import Imported
from tests.support.tables import tables

TABLES = tables("recipe_hf_nemotron")

MINITRON: dict[str, Any] = TABLES["minitron"]
"""nvidia/Minitron-4B-Base without what its revisions differ in."""
BIOMEGATRON: dict[str, Any] = TABLES["biomegatron"]
"""EMBO/BioMegatron345mUncased."""


def read(values: dict[str, Any], folder: Path) -> Imported:
    """Import the model of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return import_config(file)


@pytest.mark.parametrize(
    ("more", "head", "idle"),
    [
        ({"partial_rotary_factor": 0.5, "head_dim": 128}, 128, set()),
        (
            {"rope_percent": 0.5, "rope_scaling": None, "kv_channels": 64},
            128,
            {"rope_percent", "kv_channels"},
        ),
        (
            {"head_dim": 192, "rope_percentage": 0.25, "layer_norm_eps": 1e-3},
            192,
            {"rope_percentage", "layer_norm_eps"},
        ),
    ],
)
def test_nemotron_ignored_keys_are_reported(
    more: dict[str, Any], head: int, idle: set[str], tmp_path: Path
) -> None:
    found = read({**MINITRON, **more}, tmp_path)
    m = found.run.model
    assert (m.head_dim, m.rotary_percent, m.layernorm_epsilon, m.activation) == (
        head,
        0.5,
        1e-5,
        "squared_relu",
    )
    assert (m.layernorm_zero_centered_gamma, m.add_bias_linear, m.tie_word_embeddings) == (
        True,
        False,
        False,
    )
    assert {u.flag for u in found.unplaced if u.why == "no effect"} == idle
    assert differing(found) == []


@pytest.mark.parametrize(
    ("key", "value"), [("partial_rotary_factor", None), ("hidden_act", "silu")]
)
def test_nemotron_unsupported_is_named(key: str, value: object, tmp_path: Path) -> None:
    assert [
        said for said in differing(read({**MINITRON, key: value}, tmp_path)) if said.startswith(key)
    ]


def test_nemotron_megatron_bert_config_has_tanh_gelu(tmp_path: Path) -> None:
    found = read(BIOMEGATRON, tmp_path)
    m = found.run.model
    assert (m.family, m.norm_placement, m.activation, m.vocab_size) == (
        "bert",
        "pre",
        "gelu_tanh",
        30592,
    )
    assert differing(found) == []
    assert differing(read({**BIOMEGATRON, "architectures": ["MegatronBertForCausalLM"]}, tmp_path))
