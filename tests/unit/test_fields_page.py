"""docs/fields.md is what `schema fields` prints, and speaks of every key."""

from __future__ import annotations

import re

import pytest

from mtrain.cli.main import main
from mtrain.config.fields_page import fed, page
from mtrain.config.keys import schema_keys
from tests.support.commands import ROOT


def test_the_committed_page_is_the_one_that_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "fields"]) == 0
    made = capsys.readouterr().out
    assert made == page()
    committed = (ROOT / "docs/fields.md").read_text()
    assert committed == made, "make it again: python launch.py schema fields > docs/fields.md"


def test_every_key_has_one_row_with_what_it_may_be_and_means() -> None:
    rows = [re.split(r"(?<!\\)\|", line) for line in page().splitlines() if re.match(r"\| `[a-z]+\.", line)]
    keys = [row[1].strip(" `") for row in rows]
    assert keys == [key for key in schema_keys() if not key.startswith("recipe.")]
    assert all(len(row) == 7 and row[2].strip() and row[3].strip() and row[4].strip() for row in rows)


def test_a_key_of_experts_and_one_of_latent_attention_say_what_they_feed() -> None:
    found = fed()
    assert found["model.moe.router_topk"] == ["TransformerConfig.moe_router_topk"]
    assert found["model.mla.beta_fast"] == ["MLATransformerConfig.beta_fast"]
    assert "TransformerConfig.fp8_recipe" in found["precision.fp8_recipe"]
    assert "cluster.sm" not in found
