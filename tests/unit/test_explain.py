"""`explain`: every key and every code can be asked about, and what it says is what the schema and
the rules say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.config.messages.codes import FAMILIES, codes, rules_of, validating
from mtrain.config.messages.describe import EFFECTS, default_of, keys_of, section_of, type_of
from mtrain.config.messages.keys import choices_of, schema_keys
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import GROUPS

Explain = Callable[..., dict[str, Any]]
WITHOUT_A_MESSAGE = {"MT001", "MT321", "MT611", "MT613"}
"""Codes whose message takes a file to show, or has no words of its own."""


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(*argv: str) -> dict[str, Any]:
        assert main(["explain", "--json", *argv]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return call


@pytest.mark.sampled(9)
@pytest.mark.parametrize("code", codes())
def test_explain_code_has_meaning_trigger_and_fix(code: str, explain: Explain) -> None:
    facts = explain(code.lower())
    assert facts["code"] == code
    assert facts["about"]
    assert len(facts["means"]) > 15
    assert len(facts["do"]) > 15
    assert facts["severity"] == codes()[code].severity
    assert facts["example"] == codes()[code].example
    assert bool(facts["keys"]) is bool(facts["raised_in"]) is bool(rules_of(code))
    assert bool(facts["says"]) is (code not in WITHOUT_A_MESSAGE)


def test_explain_example_shows_message_and_fix(explain: Explain) -> None:
    facts = explain("MT101")
    assert facts["keys"][:2] == ["parallel.tp", "model.num_attention_heads"]
    assert facts["example"] == "parallel=tp3"
    assert "(8 attention heads, tp 3" in facts["says"][0]
    assert "parallel.tp=2" in facts["fix"]
    assert explain("MT132")["severity"] == "warning"
    assert explain("MT131")["severity"] == "error"


def test_explain_code_belongs_to_a_group() -> None:
    assert all(any(code.startswith(begin) for begin in FAMILIES) for code in codes())


def test_explain_rule_code_belongs_to_one_rule() -> None:
    """Require one rule per code: a reader of its explanation meets no other rule under it; MT150 is
    every key without effect.
    """
    rules = {code: {(rule.file, rule.name) for rule in rules_of(code)} for code in codes()}
    # a key without effect; too few tokens, of text or indexed; no end of documents
    shared = {
        "MT150",
        "MT605",
        "MT608",
    }
    assert {code for code, found in rules.items() if len(found) > 1} == shared


@pytest.mark.sampled(12)
@pytest.mark.parametrize("key", [key for key in schema_keys() if not key.startswith("recipe.")])
def test_explain_works_for_every_key(key: str, explain: Explain) -> None:
    facts = explain(key)
    assert facts["key"] == key
    assert facts["means"]
    assert facts["type"]
    assert facts["default"]
    assert facts["changes"]
    assert facts["chain"][0]["source"] == "default"
    choices = choices_of(key)
    assert all(choice in facts["type"] for choice in choices)


def test_explain_value_lists_setters_in_order(explain: Explain) -> None:
    facts = explain("optim.lr", "recipe=llama3/70b_h100x64", "optim.lr=1e-4")
    assert [row["value"] for row in facts["chain"]] == ["null", "null", "0.0003", "0.0001"]
    assert [re.sub(r":\d+", "", row["source"]) for row in facts["chain"]] == [
        "default",
        "conf/optim/adamw.yaml",
        "recipes/llama3/70b_h100x64.yaml",
        "command line",
    ]
    assert (facts["value"], facts["set_by"]) == ("0.0001", "command line")


def test_explain_resolved_value_is_last_link(explain: Explain) -> None:
    facts = explain("parallel.ranks", "parallel=tp2pp2", "cluster=cpu")
    assert (facts["value"], facts["set_by"]) == ("4", "resolved from tp 2 pp 2: the fewest ranks")


def test_explain_removed_section_removes_its_keys(explain: Explain) -> None:
    facts = explain("model.moe.router_topk", "model=mixtral_tiny", "model.moe=null")
    assert facts["value"] == "(not there: its section is null)"
    assert facts["set_by"] == "command line"
    assert [row["value"] for row in facts["chain"]] == [
        "2",
        "2",
        "(not there: its section is null)",
    ]
    assert explain("model.moe.router_topk", "model=mixtral_tiny")["value"] == "2"


def test_explain_mapping_is_shown_whole(explain: Explain) -> None:
    assert explain("cluster.peak_tflops", "cluster=h100x8")["value"].startswith(
        "{fp32: 67.0, tf32:"
    )


def test_explain_key_names_field_flag_and_rules(explain: Explain) -> None:
    facts = explain("parallel.tp")
    assert "TransformerConfig.tensor_model_parallel_size" in facts["feeds"]
    assert facts["flags"] == ["--tensor-model-parallel-size"]
    assert {"MT101", "MT102"} <= set(facts["validated_by"]) == set(validating("parallel.tp"))
    assert explain("model.mla.mscale")["feeds"] == ["MLATransformerConfig.mscale"]
    assert explain("parallel.recompute.method")["needs"] == "parallel.recompute.granularity=full"


@pytest.mark.parametrize("group", [*GROUPS, "model.moe", "parallel.recompute"])
def test_explain_group_lists_its_keys(group: str, explain: Explain) -> None:
    facts = explain(group)
    assert list(facts["keys"]) == keys_of(group)
    assert facts["means"]
    assert section_of(group) is not None


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.num_layers", "a whole number, at least 1, at most 134217728"),
        ("optim.min_lr", "a number, at least 0, or null"),
        ("model.init_method_std", "a number, more than 0, at most 20"),
        ("precision.dtype", "one of fp32, bf16, fp16, or null"),
        ("parallel.sequence_parallel", "true or false, or null"),
        ("parallel.distributed_optimizer", "true or false, or null"),
        ("data.split", "a list of 3 values, each a number"),
        (
            "parallel.layers_per_stage",
            "a list of any number of values, each a whole number, or null",
        ),
        ("data.path", "text, or null"),
        ("nothing.at.all", ""),
    ],
)
def test_explain_types_are_words(key: str, words: str) -> None:
    assert type_of(key) == words


def test_explain_defaults_are_yaml() -> None:
    assert default_of("model.num_layers") == "(required)"
    assert default_of("optim.min_lr") == "null"
    assert default_of("parallel.distributed_optimizer") == "null"
    assert default_of("data.suffixes") == "[.py, .txt, .rst, .md]"
    assert set(EFFECTS) == set(Effect)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("parallel.tensor", "explain"),
        ("tensor_model_parallel_size", "explain parallel.tp"),
        ("MT999", "explain MT"),
    ],
)
def test_explain_unknown_names_near_ones(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", word]) == 2
    assert near in capsys.readouterr().err


def test_explain_page_and_contents_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "parallel.tp=4", "parallel=tp2"]) == 0
    page = capsys.readouterr().out
    for words in (
        "Tensor parallel",
        "at least 1",
        "command line: 2",
        "MT101",
        "TransformerConfig.",
    ):
        assert words in page
    assert main(["explain"]) == 0
    contents = capsys.readouterr().out
    assert all(code in contents for code in codes())
    assert all(group in contents for group in GROUPS)
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {code for of_family in found["codes"].values() for code in of_family} == set(codes())
    assert tuple(found["groups"]) == tuple(GROUPS)


@pytest.mark.parametrize(
    "key",
    [
        "data.path",
        "data.blend",
        "data.tokenizer",
        "data.chat_template",
        "data.validation_blend",
        "checkpoint.resume",
    ],
)
def test_explain_learned_path_changes_weights(key: str, explain: Explain) -> None:
    assert explain(key)["changes"].startswith("contents: the resulting weights")


def test_explain_consequences_are_listed_with_effect(explain: Explain) -> None:
    assert explain("model.published.peak_lr", "model=llama3_8b")["decides"] == ["optim.lr"]
    assert (
        "precision.dtype" in explain("cluster.sm", "cluster=h100x8", "model=llama3_8b")["decides"]
    )
    assert explain("log.interval")["decides"] == []


@pytest.mark.parametrize(
    ("key", "decided", "changes"),
    [
        ("trainer.fine_tuning", "optim.lr", "numerics: the resulting weights"),
        ("cluster.device", "precision.dtype", "architecture: the weights themselves"),
    ],
)
def test_explain_deciding_key_has_effects_of_decided(
    key: str, decided: str, changes: str, explain: Explain
) -> None:
    facts = explain(key)
    assert decided in facts["decides"]
    assert facts["changes"].startswith(changes)
    assert "by the keys that it decides; where those are set, " in facts["changes"]


def test_explain_key_without_graver_effect_states_own(explain: Explain) -> None:
    assert explain("log.interval")["changes"] == "runtime: names, places, limits, output; no weight"
