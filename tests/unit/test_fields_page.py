"""docs/reference/fields.md is what `schema fields` prints, and describes every key."""

from __future__ import annotations

import re

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.messages.fields_page import fed, page
from mtrain.config.messages.keys import schema_keys
from mtrain.errors import ConfigError
from tests.support.commands import ROOT


def test_fields_page_committed_equals_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "fields"]) == 0
    made = capsys.readouterr().out
    assert made == page()
    committed = (ROOT / "docs/reference/fields.md").read_text()
    assert committed == made, (
        "make it again: python launch.py schema fields > docs/reference/fields.md"
    )


def test_fields_page_key_has_one_row_with_type_and_meaning() -> None:
    rows = [
        re.split(r"(?<!\\)\|", line)
        for line in page().splitlines()
        if re.match(r"\| `[a-z]+\.", line)
    ]
    keys = [row[1].strip(" `") for row in rows]
    assert keys == [key for key in schema_keys() if not key.startswith("recipe.")]
    assert all(
        len(row) == 7 and row[2].strip() and row[3].strip() and row[4].strip() for row in rows
    )


def test_fields_page_moe_and_mla_keys_state_fields() -> None:
    found = fed()
    assert found["model.moe.router_topk"] == ["TransformerConfig.moe_router_topk"]
    assert found["model.mla.beta_fast"] == ["MLATransformerConfig.beta_fast"]
    assert "TransformerConfig.fp8_recipe" in found["precision.fp8_recipe"]
    assert "cluster.sm" not in found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model.apply_residual_connection_post_layernorm=true", "no layer reads it"),
        ("parallel.tp_comm_overlap=true", "not offered"),
        ("parallel.average_in_collective=true", "a mean per rank is wrong"),
        ("trainer.cuda_graph_use_single_mempool=true", "pools of CUDA graphs are megatron-core's"),
        ("precision.fp8_param_gather=true", "only products are in 8 bits"),
    ],
)
def test_fields_page_unfed_field_states_reason(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([words])
    (problem,) = refused.value.problems
    assert problem.code == "MT012"
    assert says in problem.rule


def test_fields_page_renamed_field_leads_to_its_key() -> None:
    with pytest.raises(ConfigError) as refused:
        compose(["precision.fp8_format=hybrid"])
    assert refused.value.problems[0].fix == "precision.fp8=hybrid"
