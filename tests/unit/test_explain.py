"""`explain`: every key and every code can be asked about, and what it says is what the schema and the source say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.config.base import Effect
from mtrain.config.codes import FAMILIES, WORDS, codes, places, validating
from mtrain.config.describe import EFFECTS, default_of, keys_of, section_of, type_of
from mtrain.config.keys import choices_of, schema_keys
from mtrain.config.run import GROUPS

SOURCE = Path(__file__).resolve().parents[2] / "src/mtrain"
Explain = Callable[..., dict[str, Any]]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def call(*argv: str) -> dict[str, Any]:
        assert main(["explain", "--json", *argv]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    return call


def raised() -> set[str]:
    """Every code in the source, by a search that knows nothing of how they are raised."""
    text = "".join(file.read_text() for file in SOURCE.rglob("*.py") if file.name != "codes.py")
    return set(re.findall(r"\bMT\d{3}\b", text))


@pytest.mark.parametrize("code", sorted(raised()))
def test_every_code_says_what_it_means_when_it_fires_and_what_to_do(code: str, explain: Explain) -> None:
    facts = explain(code.lower())
    assert facts["code"] == code
    assert facts["about"]
    assert len(facts["means"]) > 15
    assert len(facts["do"]) > 15
    assert facts["raised_in"]
    rule = any("rules/" in file for file in facts["raised_in"])
    assert rule or code in WORDS, f"{code} is raised outside the rules: say in config/codes.py what it means"
    assert facts["says"] or code in WORDS, f"{code} has no sentence that could be found: say in config/codes.py"


def test_the_table_of_codes_names_none_that_is_never_raised() -> None:
    assert WORDS.keys() <= raised()
    assert codes().keys() == raised()
    assert all(any(code.startswith(begin) for begin in FAMILIES) for code in raised())


def test_a_code_of_a_rule_is_of_one_rule() -> None:
    """Whoever has read what a code means meets no other rule under it; MT150 is every key without effect."""
    rules = {code: {p.function for p in places(code) if "rules/" in p.file} for code in codes()}
    shared = {"MT150": "a key without effect", "MT306": "one rule in two functions"}
    shared["MT605"] = "a corpus that is too small, of text or of tokens"
    assert {code: found for code, found in rules.items() if len(found) > 1 and code not in shared} == {}


def test_the_text_of_a_rule_is_its_own_and_not_its_neighbours() -> None:
    (place,) = places("MT222")
    assert place.rules == ("a softmax over the one chosen expert is always 1 and has no gradient",)
    assert place.key == "model.moe.router_pre_softmax"
    (handed,) = places("MT103")
    assert (handed.key, handed.rules[0][:7]) == ("model.ffn_hidden_size", "{width}")
    assert places("MT132")[0].severity == "warning"
    assert places("MT131")[0].severity == "error"


@pytest.mark.parametrize("key", [key for key in schema_keys() if not key.startswith("recipe.")])
def test_every_key_can_be_explained(key: str, explain: Explain) -> None:
    facts = explain(key)
    assert facts["key"] == key
    assert facts["means"]
    assert facts["type"]
    assert facts["default"]
    assert facts["changes"]
    assert facts["chain"][0]["source"] == "default"
    choices = choices_of(key)
    assert all(choice in facts["type"] for choice in choices)


def test_a_value_comes_with_everyone_who_set_it_in_order(explain: Explain) -> None:
    facts = explain("optim.lr", "recipe=llama3/70b_h100x64", "optim.lr=1e-4")
    assert [row["value"] for row in facts["chain"]] == ["null", "0.0003", "0.0001"]
    assert [re.sub(r":\d+", "", row["source"]) for row in facts["chain"]] == [
        "default",
        "recipes/llama3/70b_h100x64.yaml",
        "command line",
    ]
    assert (facts["value"], facts["set_by"]) == ("0.0001", "command line")
    facts = explain("optim.weight_decay", "recipe=llama3/70b_h100x64")
    assert [row["source"].partition(":")[0] for row in facts["chain"]] == [
        "default",
        "conf/optim/adamw.yaml",
        "recipes/llama3/70b_h100x64.yaml",
    ]


def test_what_is_resolved_is_the_last_link(explain: Explain) -> None:
    facts = explain("parallel.ranks", "parallel=tp2pp2", "cluster=cpu")
    assert (facts["value"], facts["set_by"]) == ("4", "resolved from tp 2 pp 2: the fewest ranks")


def test_a_section_that_was_taken_away_takes_its_keys(explain: Explain) -> None:
    facts = explain("model.moe.router_topk", "model=mixtral_tiny", "model.moe=null")
    assert facts["value"] == "(not there: its section is null)"
    assert facts["set_by"] == "command line"
    assert [row["value"] for row in facts["chain"]] == ["2", "2", "(not there: its section is null)"]
    assert explain("model.moe.router_topk", "model=mixtral_tiny")["value"] == "2"


def test_a_mapping_is_shown_whole(explain: Explain) -> None:
    assert explain("cluster.peak_tflops", "cluster=h100x8")["value"].startswith("{fp32: 67.0, tf32:")


def test_a_key_names_the_field_the_flag_and_the_rules(explain: Explain) -> None:
    facts = explain("parallel.tp")
    assert "TransformerConfig.tensor_model_parallel_size" in facts["feeds"]
    assert facts["flags"] == ["--tensor-model-parallel-size"]
    assert {"MT101", "MT102"} <= set(facts["validated_by"]) == set(validating("parallel.tp"))
    assert explain("model.mla.mscale")["feeds"] == ["MLATransformerConfig.mscale"]
    assert explain("parallel.recompute.method")["needs"] == "parallel.recompute.granularity=full"


@pytest.mark.parametrize("group", [*GROUPS, "model.moe", "parallel.recompute"])
def test_a_group_lists_its_keys(group: str, explain: Explain) -> None:
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
        ("parallel.layers_per_stage", "a list of any number of values, each a whole number, or null"),
        ("data.path", "text, or null"),
        ("nothing.at.all", ""),
    ],
)
def test_types_are_told_in_words(key: str, words: str) -> None:
    assert type_of(key) == words


def test_defaults_are_told_as_yaml() -> None:
    assert default_of("model.num_layers") == "(required)"
    assert default_of("optim.min_lr") == "null"
    assert default_of("parallel.distributed_optimizer") == "null"
    assert default_of("data.suffixes") == "[.py, .txt, .rst, .md]"
    assert set(EFFECTS) == set(Effect)


@pytest.mark.parametrize(
    ("word", "near"),
    [("parallel.tensor", "explain"), ("tensor_model_parallel_size", "explain parallel.tp"), ("MT999", "explain MT")],
)
def test_what_does_not_exist_is_answered_with_what_is_near(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", word]) == 2
    assert near in capsys.readouterr().err


def test_the_page_and_the_contents_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "parallel.tp=4", "parallel=tp2"]) == 0
    page = capsys.readouterr().out
    for words in ("Tensor parallel", "at least 1", "command line: 2", "MT101", "TransformerConfig."):
        assert words in page
    assert main(["explain"]) == 0
    contents = capsys.readouterr().out
    assert all(code in contents for code in codes())
    assert all(group in contents for group in GROUPS)
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {code for of_family in found["codes"].values() for code in of_family} == set(codes())
    assert tuple(found["groups"]) == tuple(GROUPS)


def test_nothing_is_imported_to_explain() -> None:
    code = (
        "import sys\nfrom mtrain.cli.main import main\n"
        "main(['explain', 'MT609']); main(['explain', 'model.num_layers'])\n"
        "print(sorted(m for m in ('torch', 'megatron', 'numpy') if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
