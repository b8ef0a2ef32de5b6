"""Annotations of the schema's keys: one declaration from which the tables are made."""

from __future__ import annotations

from typing import get_args

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.engine.core_fields import feeds
from mtrain.config.messages.fields_page import fed
from mtrain.config.messages.keys import (
    choices_of,
    field_of,
    flag_of,
    foreign,
    key_of,
    keys,
    schema_keys,
    when_of,
)
from mtrain.config.messages.suggestions import accepts
from mtrain.config.resolve.conditional import CONDITIONAL, condition
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.config.schema.model import GATED
from mtrain.recipes.megatron.arguments import Arguments, read_all
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.flags_unmapped import OTHERS
from mtrain.recipes.megatron.importer import import_texts
from mtrain.recipes.megatron.table import table
from tests.support.configs import LAPTOP, tiny

SCRIPT = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--swiglu
--multi-latent-attention --kv-lora-rank 8 --rope-type yarn --mscale 2 --num-experts 4
--moe-router-topk 1
--moe-apply-probs-on-input --mtp-num-layers 1 --bf16 --fp8-format hybrid --fp8-recipe delayed
--fp8-margin 3
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
--num-layers-per-virtual-pipeline-stage 1
--micro-batch-size 1 --global-batch-size 8 --train-samples 800 --rampup-batch-size 4 4 80 --lr 0.001
--optimizer sgd
--use-distributed-optimizer --overlap-grad-reduce --sequence-parallel --vocab-size 500 --mock-data
"""


def test_schema_keys_conditions_name_existing_keys() -> None:
    conditions = {path: key_of(path).when for path in keys() if key_of(path).when}
    terms = [(path, term) for path, text in conditions.items() for term in condition(text).terms]
    assert len(terms) > 100
    for path, term in terms:
        field = field_of(term.key)
        assert field is not None, path
        words = [
            word
            for word in term.words
            if word not in ("null", "true", "false") and not word.isdigit()
        ]
        assert not choices_of(term.key) or set(words) <= set(choices_of(term.key)), path


def test_schema_keys_null_meaning_is_an_accepted_value() -> None:
    paths = [path for path in schema_keys() if key_of(path).null is not None]
    assert len(paths) > 30
    for path in paths:
        assert when_of(path), f"{path}: null stands for a value where the key has an effect"
        assert accepts(path, key_of(path).null), path
        assert accepts(path, None), path


def test_schema_keys_declared_field_gets_value() -> None:
    paths = [path for path in schema_keys() if key_of(path).feeds]
    assert len(paths) > 100
    fields = fed()
    for path in paths:
        names = {name.rpartition(".")[2] for name in key_of(path).feeds.split()}
        assert names <= {field.partition(".")[2] for field in fields[path]}, path


def test_schema_keys_flag_is_declared_once() -> None:
    flags = [flag for entry in table() for flag in entry.flags]
    assert len(flags) == len(set(flags))
    assert not OTHERS.keys() & set(flags), (
        "it has a key now: take it out of recipes/megatron/flags_unmapped.yaml"
    )
    assert all(flag.startswith("--") for flag in flags)


def test_schema_keys_unkeyed_flag_has_no_key_name() -> None:
    names = {f"--{path.rpartition('.')[2].replace('_', '-')}" for path in keys()}
    assert not OTHERS.keys() & names, "name the flag in the schema: Key(flag=...)"


def test_schema_keys_flag_order_does_not_matter() -> None:
    there, back = (
        read_all(Arguments(SCRIPT.split()), entries, {"ranks": 8})
        for entries in (table(), table()[::-1])
    )
    assert there == back
    assert there["precision.fp8_margin"] == 3
    assert there["model.moe.apply_probs_on_input"] is True


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("parallel.vpp>1", 2, True),
        ("parallel.vpp>1", 1, False),
        ("parallel.vpp>1", None, False),
        ("model.window_size", 4, True),
        ("model.window_size", None, False),
        ("optim.name=adamw|muon", "muon", True),
        ("optim.name=adamw|muon", "sgd", False),
        ("data.packed=true", True, True),
        ("parallel.sequence_parallel=false", None, True),
        ("model.mla=null", None, True),
    ],
)
def test_schema_keys_condition_is_evaluated_by_text(text: str, value: object, holds: bool) -> None:
    assert condition(text).holds({text.split("=")[0].split(">")[0]: value}.get) is holds


def test_schema_keys_condition_reads_as_written() -> None:
    text = "parallel.vpp>1 and optim.name=adamw|muon|sgd and model.window_size"
    assert (
        str(condition(text))
        == "a parallel.vpp above 1 and optim.name=adamw, muon or sgd and a model.window_size"
    )
    with pytest.raises(ValueError, match="no condition"):
        condition("parallel.vpp < 2")


def test_schema_keys_key_waits_for_active_condition() -> None:
    margin = next(key for key in CONDITIONAL if key.path == "precision.fp8_margin")
    delayed = tiny(precision__fp8_recipe="delayed")
    assert not margin.active(delayed), "without fp8 the recipe says nothing"
    assert margin.active(apply(delayed, {"precision.fp8": "hybrid"}))


def test_schema_keys_gated_condition_names_every_gate() -> None:
    field = field_of("model.activation")
    assert field is not None
    assert set(GATED.partition("=")[2].split("|")) == {
        word for word in get_args(field.annotation) if "glu" in word
    }


def test_schema_keys_new_key_reaches_everything() -> None:
    key = "precision.loss_scale_hysteresis"
    assert "OptimizerConfig.hysteresis" in feeds(resolve(tiny(), LAPTOP))[key]
    assert foreign()["hysteresis"] == key
    assert (flag := flag_of(key)) is not None
    assert flag.name == "--hysteresis"
    run = resolve(compose(["precision=fp16", "data=mock", f"{key}=5"]).run, LAPTOP)
    text = export_script(run)
    assert "--hysteresis 5" in text
    assert import_texts([(text, "export")], "x").run.precision.loss_scale_hysteresis == 5
