"""Sweeps and layouts that describe no run are refused by name, with a fix that runs."""

from __future__ import annotations

import shlex

import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.compose.overrides import jobs
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("sweep_errors")

WORDS = "name at most 1000 values, parted by commas"


def _refused(word: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        jobs([word])
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("MT010", word.partition("=")[0])
    return problem


@pytest.mark.parametrize(
    ("word", "rule", "fix"),
    TABLES["bad_syntax"],
)
def test_sweep_bad_syntax_has_working_fix(word: str, rule: str, fix: str) -> None:
    problem = _refused(word)
    assert rule in problem.rule
    first = shlex.split(problem.fix.split(" or ")[0])
    assert first == [fix]
    assert jobs(first)


@pytest.mark.parametrize(
    ("word", "rule", "fix"),
    TABLES["unclear_intent"],
)
def test_sweep_unclear_intent_explains_syntax(word: str, rule: str, fix: str) -> None:
    problem = _refused(word)
    assert rule in problem.rule
    assert fix in problem.fix


def _problem(*words: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load(words, LAPTOP, {}, to_run=False)
    return caught.value.problems[0]


@pytest.mark.parametrize(
    "words",
    [
        "data=mock optim.lr=1e-3,3e-3",
        "data=mock trainer.seed=range(1,4)",
        "model=llama_tiny,llama3_8b",
        "data=mock parallel=tp2,pp2",
        "cluster=h100x8,h100x16 log.interval=1",
    ],
)
def test_sweep_missing_flag_is_the_only_fix(words: str) -> None:
    problem = _problem(*words.split())
    assert problem.code == "MT010"
    assert problem.fix == "-m, with the same words", (
        "neither the verb nor a word or a value may be lost"
    )


def test_sweep_flag_is_what_verb_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-m", "data=mock", "optim.lr=1e-3,3e-3"]) == 0
    assert "2 of 2 pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("range(0.001,0.003,0.001)", ["0.001", "0.002"]),
        ("range(0.1,0.3,0.1)", ["0.1", "0.2"]),
        ("range(0.1,0.4,0.1)", ["0.1", "0.2", "0.3"]),
        ("range(0.3,0,-0.1)", ["0.3", "0.2", "0.1"]),
        ("range(1e-4,4e-4,1e-4)", ["0.0001", "0.0002", "0.0003"]),
        ("range(1,4)", ["1", "2", "3"]),
    ],
)
def test_sweep_range_excludes_its_stop(values: str, expected: list[str]) -> None:
    assert [job.swept["optim.lr"] for job in jobs([f"optim.lr={values}"])] == expected


@pytest.mark.parametrize(
    ("sizes", "rule", "fix"),
    TABLES["stage_sizes"],
)
def test_sweep_stage_sizes_suggest_nearest_fit(sizes: str, rule: str, fix: str) -> None:
    problem = _problem("parallel=pp2", f"parallel.layers_per_stage={sizes}")
    assert rule in problem.rule
    assert problem.fix.split(" or ")[0] == fix
    if fix:
        words = [fix] if "layers_per_stage" in fix else [fix, f"parallel.layers_per_stage={sizes}"]
        assert load(["parallel=pp2", *words], LAPTOP, {}, to_run=False)


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ("[2,2]", "parallel.pp=2"),
        ("[5,-1]", "parallel.pp=2 parallel.layers_per_stage=[3,1]"),
        ("[1,1,9]", "parallel.pp=3 parallel.layers_per_stage=[1,1,2]"),
    ],
)
def test_sweep_stage_sizes_bring_their_pipeline(sizes: str, fix: str) -> None:
    problem = _problem(f"parallel.layers_per_stage={sizes}")
    assert problem.fix == fix
    words = fix.split()
    sized = words if len(words) > 1 else [*words, f"parallel.layers_per_stage={sizes}"]
    assert load(["parallel=single", *sized], LAPTOP, {}, to_run=False)
