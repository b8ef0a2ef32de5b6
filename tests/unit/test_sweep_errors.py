"""Sweeps and layouts that stand for no run are refused by name, with a fix that runs."""

from __future__ import annotations

import shlex

import pytest

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.compose.sweep import jobs
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP

WORDS = "name at most 1000 values, parted by commas"


def _refused(word: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        jobs([word])
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("MT010", word.partition("=")[0])
    return problem


@pytest.mark.parametrize(
    ("word", "rule", "fix"),
    [
        ("trainer.seed=range(10,1)", "counts up from 10", "trainer.seed=range(10,1,-1)"),
        ("trainer.seed=range(1,10,-1)", "counts down from 1", "trainer.seed=range(1,10)"),
        ("trainer.seed=range(5,5)", "has no number", "trainer.seed=range(5,6)"),
        ("trainer.seed=range(0)", "has no number", "trainer.seed=range(0,1)"),
        ("trainer.seed=range(1", "1 opening and 0 closing", "trainer.seed=range(1)"),
        ("trainer.seed=range(1,3))", "1 opening and 2 closing", "trainer.seed=range(1,3)"),
        ("trainer.seed=range(1,3),7", "must be the whole value", "trainer.seed=1,2,7"),
        ("trainer.seed=range(1,2,3,4)", "4 arguments", "trainer.seed=1,2,3,4"),
        ("trainer.seed=Range(1,3)", "no such function", "trainer.seed=range(1,3)"),
        ("optim.lr=1e-3,", "no value on one side", "optim.lr=1e-3"),
        ("optim.lr=,1e-3", "no value on one side", "optim.lr=1e-3"),
        ("optim.lr=1e-3,,2e-3", "no value on one side", "optim.lr=1e-3,2e-3"),
        ("optim.lr=choice(1e-3,)", "no value on one side", "optim.lr=choice(1e-3)"),
        ("optim.lr=choice(1e-3,2e-3", "1 opening and 0 closing", "optim.lr=choice(1e-3,2e-3)"),
        ("optim.lr=choice(1e-3,choice(1,2))", "must be the whole value", "optim.lr=1e-3,1,2"),
        ("optim.lr=1e-3;2e-3", "';'", "optim.lr=1e-3,2e-3"),
        ("optim.lr=[1e-3,2e-3]", "a list is one value", "optim.lr=1e-3,2e-3"),
        ("model=llama_tiny,", "no value on one side", "model=llama_tiny"),
        ("model=[llama_tiny,gpt2]", "a list is one value", "model=llama_tiny,gpt2"),
        ("model=glob(llama_tny)", "no name is like", "model=llama_tiny"),
        ("parallel=tp2,,pp2", "no value on one side", "parallel=tp2,pp2"),
        ("data.split=[1,1,1],", "no value on one side", "data.split=[1,1,1]"),
        ("recipe=llama/tiny_cpu,", "no value on one side", "recipe=llama/tiny_cpu"),
    ],
)
def test_sweep_bad_syntax_has_working_fix(word: str, rule: str, fix: str) -> None:
    problem = _refused(word)
    assert rule in problem.rule
    first = shlex.split(problem.fix.split(" or ")[0])
    assert first == [fix]
    assert jobs(first)


@pytest.mark.parametrize(
    ("word", "rule", "fix"),
    [
        ("optim.lr=", "is empty", "leave it out"),
        ("model=", "is empty", "leave it out"),
        ("recipe=", "is empty", "leave it out"),
        ("optim.lr=range(1", "1 opening and 0 closing", WORDS),
        ("optim.lr=range()", "names no value", WORDS),
        ("optim.lr=range(a,b)", "a is no number", WORDS),
        ("optim.lr=choice(", "0 closing", WORDS),
        ("optim.lr=choice()", "names no value", WORDS),
        ("optim.lr=interval(0,1)", "no end of values", WORDS),
        ("trainer.seed=glob(1*)", "has none", WORDS),
        ("trainer.seed=range(1,1e9)", "more than 1000", WORDS),
        ("model=glob(zzz*)", "no name is like zzz*", WORDS),
    ],
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
    [
        (
            "[5,-1]",
            "stage 1 (counted from 0) would hold -1 layers",
            "parallel.layers_per_stage=[3,1]",
        ),
        (
            "[-2,6]",
            "stage 0 (counted from 0) would hold -2 layers",
            "parallel.layers_per_stage=[1,3]",
        ),
        ("[1,5]", "6 layers in all, and the model has 4", "parallel.layers_per_stage=[1,3]"),
        ("[2,1]", "3 layers in all, and the model has 4", "parallel.layers_per_stage=[2,2]"),
        ("[1,1,1,1]", "4 sizes for pp 2", "parallel.pp=4"),
        ("[4]", "1 sizes for pp 2", "parallel.layers_per_stage=[2,2]"),
        ("[]", "0 sizes for pp 2", "parallel.layers_per_stage=[2,2]"),
        ("[2.4,1.6]", "must be a whole number", "parallel.layers_per_stage=[2,2]"),
        ("'[2,2]'", "must be a list", "parallel.layers_per_stage=[2,2]"),
        ("[two,2]", "must be a whole number", ""),
        ("two", "must be a list", ""),
        ("[9223372036854775807,1]", "layers in all", "parallel.layers_per_stage=[3,1]"),
    ],
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
