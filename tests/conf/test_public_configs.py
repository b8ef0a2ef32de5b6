"""Every model that ships, against a stored copy of its public config.json, read as `recipe import`
reads one.

`public_configs.json` holds the facts of each file without names of tokens, of programs and of how
weights are stored; the public copy, or the public code that holds its values, in which they were
seen (`seen` is false where none was); and the exact number of parameters where that is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mtrain.config.compose.paths import choices_of_group, conf_dir
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import ConfigError
from mtrain.plan.count import parameters
from mtrain.recipes.delta import section
from mtrain.recipes.huggingface.config_file import Json
from mtrain.recipes.huggingface.exporter import TRAINING, same_model
from mtrain.recipes.huggingface.importer import KINDS, import_config, kind_of
from mtrain.recipes.imported import Imported

FACTS: dict[str, Json] = json.loads((Path(__file__).parent / "public_configs.json").read_text())
CONFIGS = {name: entry["config"] for name, entry in FACTS.items() if "config" in entry}
TABLES = {name: entry for name, entry in FACTS.items() if "table" in entry}
FAMILIES_IN_SMALL = (
    "bert",
    "deepseek",
    "deepseek_v3_2",
    "gemma",
    "glm45",
    "gpt_oss",
    "llama",
    "llava",
    "megatron_bert",
    "mixtral",
    "nemotron4",
    "nemotron_h",
    "phi3",
    "pythia",
    "qwen3_next",
    "t5",
)
OURS = {f"{family}_tiny" for family in FAMILIES_IN_SMALL}
SAID = re.compile(r"([\d.,]*\d)([BM]?) parameters(?! active)")
"""A number of parameters in the first lines of a model's file."""

Told = dict[str, tuple[Any, Any, str]]
V2: Told = {
    "init_method_std": (
        0.02,
        0.006,
        "0.006 in arXiv 2405.04434, section 3.1.2; its appendix B says no other",
    ),
}
V3: Told = {
    "init_method_std": (0.02, 0.006, "0.006 in arXiv 2412.19437, section 4.2"),
    "mtp_loss_scaling_factor": (
        None,
        0.3,
        "no file says it; 0.3 at first in arXiv 2412.19437, section 4.2",
    ),
}
DRAWN: Told = {
    "init_method_std": (0.1, 0.02, "the code that it was trained with draws so: state-spaces/mamba")
}
BALANCED = "0.9 of config.json is of no report; the weight of the default is trained with"
UNDROPPED = "0.1 is of fine-tuning: T5 v1.1 was pre-trained without (its README)"
T5: Told = dict.fromkeys(("attention_dropout", "hidden_dropout"), (0.1, 0.0, UNDROPPED))
TRAINED: dict[str, Told] = {
    **{name: T5 for name in CONFIGS if name.startswith("t5_v1_1")},
    **{name: DRAWN for name in CONFIGS if name.startswith("mamba2_")},
    "nemotron3_nano_30b_a3b": {
        "moe.router_load_balancing_type": (
            "none",
            "seq_aux_loss",
            "no file says it; of its published training",
        ),
        "moe.aux_loss_coeff": (0.0, 1e-4, "no file says it; of its published training"),
    },
    "deepseek_v2": {
        **V2,
        "moe.aux_loss_coeff": (0.001, 0.003, "alpha_1 in arXiv 2405.04434, section 3.1.2"),
    },
    "deepseek_v2_lite": V2,
    "deepseek_v3": V3,
    "deepseek_v31": V3,
    "deepseek_v3_2": {
        **V3,
        "dsa.indexer_use_sparse_loss": (
            False,
            True,
            "the longer stage of its training, by its report",
        ),
    },
    "glm45_air": {
        "mtp_loss_scaling_factor": (None, 0.3, "no file says it; 0.3 at first in arXiv 2508.06471")
    },
    "gpt_oss_20b": {"moe.aux_loss_coeff": (0.15, 0.01, BALANCED)},
    "gpt_oss_120b": {"moe.aux_loss_coeff": (0.1, 0.01, BALANCED)},
}
"""Model -> key of its training alone -> what its config.json makes of it, what ships, and why."""
NOTHING = {"no effect", "derived here"}
"""Reasons to leave out a key of a file for a model that computes the same."""
ALONE = {
    "use_sliding_window": (
        "turns on a window that no layer has: it is null, or begins behind the last layer"
    )
}
"""Switches that say nothing without a second key -> why."""
WHOLE = ("llama32_3b", "deepseek_v3")
"""Models whose every number and switch is changed, one at a time; of the others one each."""


def shipped(name: str) -> ModelConfig:
    """Return the composed `model` of a shipped file."""
    model = section("model", name)
    assert isinstance(model, ModelConfig)
    return model


def flat(values: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def told(model: ModelConfig) -> Json:
    """Return every key of `model` that a config.json can express; the width of a head even if it is
    derived.
    """
    dump = model.model_dump(exclude={"name", "published"})
    return {
        key: value
        for key, value in flat({**dump, "kv_channels": model.head_dim})
        if value is not None
    }


def own(m: ModelConfig) -> int:
    """Return the number of parameters without rows that only pad, and without layers that predict
    further.
    """
    tables = 1 if m.tie_word_embeddings else 2
    biases = 0 if m.bert is None else 1
    padding = (m.padded_vocab_size - m.vocab_size) * (tables * m.hidden_size + biases)
    return parameters(m.model_copy(update={"mtp_num_layers": None})) - padding


@cache
def read(text: str) -> Imported:
    """Return the model of a config.json.

    Raises:
        ConfigError: it is no model.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(text)
        return import_config(file)


def apart(name: str, config: Json) -> list[str]:
    """Return the differences between the model of a config.json and the shipped one."""
    try:
        found = read(json.dumps(config))
    except ConfigError as error:
        return [str(error)]
    left = told(found.run.model)
    right = told(shipped(name))
    known = {key: (there, here) for key, (there, here, _) in TRAINED.get(name, {}).items()}
    pairs = {key: (left.get(key), right.get(key)) for key in left.keys() | right.keys()}
    out = [
        f"{key}: {pair}"
        for key, pair in pairs.items()
        if pair != known.get(key, (pair[0], pair[0]))
    ]
    return [*out, *(f"{u.flag}: {u.why}: {u.text}" for u in found.unplaced if u.why not in NOTHING)]


def counting(config: Json) -> list[str]:
    """Return the dotted keys of numbers and switches that describe the model, according to the
    reader.
    """
    idle = {u.flag for u in read(json.dumps(config)).unplaced if u.why == "no effect"}
    idle |= {*KINDS[kind_of(config)].reads.irrelevant, *ALONE}
    return [
        key for key, value in flat(config) if key not in idle and isinstance(value, int | float)
    ]


def changed(config: Json, key: str) -> Json:
    """Return a config.json with another value of a number or a switch."""
    out: Json = json.loads(json.dumps(config))
    *sections, last = key.split(".")
    node = out
    for name in sections:
        node = node[name]
    value = node[last]
    node[last] = not value if isinstance(value, bool) else value * 2 or 1
    return out


def test_public_config_covers_every_model_that_is_not_ours() -> None:
    assert set(choices_of_group("model")) - set(FACTS) == OURS
    assert not set(FACTS) & OURS
    assert all(entry["source"] for entry in FACTS.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_public_config_equals_model(name: str) -> None:
    assert apart(name, CONFIGS[name]) == []
    assert same_model(read(json.dumps(CONFIGS[name])).run.model, shipped(name)) == [], (
        "weights of the Hub do not fit"
    )


def test_public_config_differences_concern_training_only() -> None:
    assert {key for keys in TRAINED.values() for key in keys} <= TRAINING


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGS)
def test_public_config_changed_fact_changes_model(name: str) -> None:
    keys = counting(CONFIGS[name])
    assert len(keys) >= (4 if "gemma3_" in name else 10)
    for key in keys if name in WHOLE else [Random(name).choice(keys)]:
        assert apart(name, changed(CONFIGS[name], key)) != [], key


@pytest.mark.parametrize("name", CONFIGS)
def test_public_config_published_parameter_count(name: str) -> None:
    """Count the biases of routers, which are no parameters here."""
    m = shipped(name)
    known = FACTS[name]
    biases = 0
    if m.moe is not None and m.moe.router_enable_expert_bias:
        layers = (
            m.hybrid.pattern.count("E") if m.hybrid else m.num_layers - m.moe.first_dense_layers
        )
        biases = m.moe.num_experts * layers
    rounded = pytest.approx(known.get("billions", 0.0) * 1e9, rel=1e-5)
    assert own(m) + biases == known.get("parameters", rounded)


def test_public_config_file_parameter_counts() -> None:
    for name in choices_of_group("model"):
        for said, unit in SAID.findall((conf_dir() / f"model/{name}.yaml").read_text()):
            digits = said.replace(",", "")
            last = 10.0 ** -len(digits.partition(".")[2])
            parameters = own(shipped(name)) / {"B": 1e9, "M": 1e6, "": 1}[unit]
            assert abs(parameters - float(digits)) <= last / 2, name


@pytest.mark.parametrize("name", TABLES)
def test_public_config_table_numbers(name: str) -> None:
    """Count 12 L h^2 + V h for each table of embeddings, and 13 L h + 2 h + S h for biases, norms
    and positions.
    """
    known = TABLES[name]
    m = shipped(name)
    table = known["table"]
    assert {key: getattr(m, key) for key in table} == table
    heads = (m.num_query_groups, m.kv_channels, m.hidden_size // m.num_attention_heads)
    assert (*heads, m.gated, m.moe, m.mla) == (
        None,
        None,
        known.get("head", 128),
        False,
        None,
        None,
    )
    layers = m.num_layers
    h = m.hidden_size
    embeddings = 1 if m.tie_word_embeddings else 2
    products = 12 * layers * h * h + embeddings * m.padded_vocab_size * h
    assert products / 1e9 == pytest.approx(known["billions"], rel=1e-3)
    assert parameters(m) == products + 13 * layers * h + 2 * h + m.max_position_embeddings * h
    assert parameters(m) == known.get("parameters", parameters(m))
