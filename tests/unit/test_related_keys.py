"""A rule that relates several keys names each of them, with its value and who set it."""

from __future__ import annotations

import json

import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.rules import Answers, findings_and_reads, value_at
from mtrain.config.rules.related import related
from mtrain.errors import ConfigError, Problem, Related
from tests.support.catalogue import accepted
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("related_keys")


def problem(words: str, code: str) -> Problem:
    try:
        found = load(words.split(), LAPTOP, {}, to_run=False).warnings
    except ConfigError as error:
        found = error.problems
    return next(p for p in found if p.code == code)


def test_related_keys_layers_and_stages_name_their_setters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "model.num_layers=81", "parallel=pp4"]) == 2
    text = capsys.readouterr().err
    assert "parallel.pp=4: cannot split the layers into equal stages" in text
    assert "\n  origin: command line; with model.num_layers=81 (command line)\n" in text
    assert main(["check", "model.num_layers=81", "parallel=pp4", "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)["problems"]
    assert row["related"] == [{"path": "model.num_layers", "value": 81, "source": "command line"}]


def test_related_keys_unknown_setter_has_no_parentheses() -> None:
    assert Related("parallel.pp", 4, "").render() == "parallel.pp=4"
    assert Related("parallel.pp", 4, "command line").render() == "parallel.pp=4 (command line)"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "code", "keys"),
    TABLES["below"],
)
def test_related_keys_stand_below_the_rule(words: str, code: str, keys: dict[str, str]) -> None:
    found = {key.path: key for key in problem(words, code).related}
    assert keys.keys() <= found.keys()
    assert not any(key.endswith(".") for key in found)
    for key, source in keys.items():
        assert found[key].source.startswith(source)


def test_related_keys_were_read_by_the_rule() -> None:
    seen = 0
    for run in accepted():
        for finding, reads in findings_and_reads(run, Answers()):
            keys = related(finding, run, reads, {})
            assert finding.path not in keys
            sections = {read for read in reads if read.endswith(".")}
            assert all(
                k in {*reads, *finding.also} or any(k.startswith(s) for s in sections) for k in keys
            )
            seen += len(keys)
    assert seen > 30


def test_related_keys_long_is_cut_and_hostile_escaped() -> None:
    key = Related("data.blend", ["x" * 500], "a\nb")
    text = Problem("MT000", "data.path", None, "rule", "", related=(key,)).render()
    assert len(text) < 400
    assert text.count("\n") == 1
    assert value_at(accepted()[0], "no.such.key") is None


def test_related_keys_pass_between_ranks() -> None:
    from mtrain.launching.worker import describe, revive

    error = ConfigError([problem("model.num_layers=81 parallel=pp4", "MT107")])
    assert str(revive(json.loads(json.dumps(describe(error))))) == str(error)
