"""`compare`: runs that must have the same numbers, and the first step at which they do not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.dump import run_yaml
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP, tiny

STEPS = 40
Lines = list[dict[str, Any]]


def made_by(seed: int) -> Lines:
    """Return the lines of a healthy run: a loss that falls with noise, an evaluation at every tenth
    step.
    """
    dice = random.Random(seed)
    lines: Lines = []
    for step in range(1, STEPS + 1):
        loss = 2 + 6 / step**0.5 + dice.gauss(0, 0.05)
        norm = 1 + dice.random()
        values = {"loss": loss, "grad_norm": norm, "lr": 1e-3 / step, "tokens": 512}
        lines.append({"step": step, "batch_size": 16, **values, "step_s": 0.1})
        if step % 10 == 0:
            lines.append({"step": step, "valid_loss": loss + 0.1, "valid_tokens": 64})
    return lines


def rounded(lines: Lines, size: float, seed: int = 1) -> Lines:
    """Return the lines of another order of sums: numbers that differ by up to `size`."""
    dice = random.Random(seed)
    keys = ("loss", "grad_norm", "valid_loss")
    return [
        {k: v * (1 + dice.uniform(-size, size)) if k in keys else v for k, v in line.items()}
        for line in lines
    ]


def folder(home: Path, lines: Lines, **keys: Any) -> Path:
    """Write a run folder."""
    home.mkdir()
    keys = {"log__name": home.name, **keys}
    (home / "run.yaml").write_text(run_yaml(resolve(tiny(**keys), LAPTOP)))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (home / "metrics.jsonl").write_text(text)
    return home


@dataclass(frozen=True)
class Pair:
    """Two runs of one recipe in two layouts, and what `compare` must find."""

    name: str
    keys: dict[str, Any]
    """Keys of the second run."""
    size: float = 2e-7
    """Differences of rounding."""
    fault: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    at: int = 0
    """The step of the fault, and of all later ones; 0: there is none."""
    what: str = ""
    both: dict[str, Any] = field(default_factory=dict)
    """Keys of both runs."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tp": 2, "parallel__ranks": 2},
    "tp2sp": {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__ranks": 2},
    "pp2": {"parallel__pp": 2, "parallel__ranks": 2},
    "dp2": {"parallel__ranks": 2, "trainer__micro_batch_size": 2},
    "cp2": {"parallel__cp": 2, "parallel__ranks": 2},
    "recomputed": {"parallel__recompute__granularity": "full"},
    "distributed optimizer": {"parallel__ranks": 2, "parallel__distributed_optimizer": True},
    "kernels": {"kernels__norm": "reference"},
    "speed": {"log__interval": 5, "trainer__eval_interval": 7},
    "same": {},
}
HALF = {"precision__dtype": "bf16"}
EQUAL = [Pair(name, keys) for name, keys in LAYOUTS.items()]
EQUAL += [
    Pair("half", LAYOUTS["tp2"], 5e-4, both=HALF),
    Pair("half pp", LAYOUTS["pp2"], 5e-4, both=HALF),
    Pair("bitwise", LAYOUTS["pp2"], 0.0),
]


def scaled(key: str, by: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a fault that scales a key."""
    return lambda line: {**line, key: line[key] * by} if key in line else line


def not_finite(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "loss": None} if "loss" in line else line


FAULTY = [
    Pair("loss", LAYOUTS["tp2"], fault=scaled("loss", 1.0001), at=23, what="loss"),
    Pair("loss at once", LAYOUTS["pp2"], fault=scaled("loss", 1.1), at=1, what="loss"),
    Pair("loss at the end", LAYOUTS["dp2"], fault=scaled("loss", 0.99), at=40, what="loss"),
    Pair("norm", LAYOUTS["tp2sp"], fault=scaled("grad_norm", 1.001), at=17, what="grad_norm"),
    Pair(
        "norm of a share", LAYOUTS["dp2"], fault=scaled("grad_norm", 2**0.5), at=1, what="grad_norm"
    ),
    Pair("rate", LAYOUTS["cp2"], fault=scaled("lr", 1.000001), at=12, what="lr"),
    Pair("tokens", LAYOUTS["dp2"], fault=scaled("tokens", 2), at=5, what="tokens"),
    Pair("batch", LAYOUTS["tp2"], fault=scaled("batch_size", 2), at=9, what="batch_size"),
    Pair("not finite", LAYOUTS["tp2"], fault=not_finite, at=31, what="loss"),
    Pair("evaluation", LAYOUTS["pp2"], fault=scaled("valid_loss", 1.01), at=20, what="valid_loss"),
    Pair("half", LAYOUTS["tp2"], 5e-4, scaled("loss", 1.01), 33, "loss", HALF),
    Pair("half norm", LAYOUTS["pp2"], 5e-4, scaled("grad_norm", 1.1), 8, "grad_norm", HALF),
    Pair("no layout", {}, 0.0, scaled("loss", 1.001), 14, "loss"),
]


@pytest.mark.parametrize(
    "pair",
    [
        pair if place in (0, 10, 13, 21) else pytest.param(pair, marks=pytest.mark.full)
        for place, pair in enumerate([*EQUAL, *FAULTY])
    ],
    ids=lambda pair: f"{pair.name} {pair.at}",
)
def test_report_compare_names_first_step_that_differs(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = made_by(len(pair.name))
    others = rounded(lines, pair.size)
    if pair.fault is not None:
        others = [pair.fault(line) if line["step"] >= pair.at else line for line in others]
    one = folder(tmp_path / "one", lines, **pair.both)
    other = folder(tmp_path / "other", others, **(pair.both | pair.keys))
    code = main(["compare", str(one), str(other), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["expected_equal"]
    assert found["digests"]["left"] == found["digests"]["right"]
    assert found["steps"] == STEPS
    assert code == (1 if pair.at else 0)
    if pair.at:
        assert (found["first"]["first"], found["first"]["what"]) == (pair.at, pair.what)
    else:
        assert found["equal"]


EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rate": ({}, {"optim__lr": 1e-3}),
    "seed": ({}, {"trainer__seed": 7, "parallel__ranks": 2, "trainer__micro_batch_size": 2}),
    "dropout in other layouts": (
        {"model__hidden_dropout": 0.1},
        {"model__hidden_dropout": 0.1, **LAYOUTS["tp2"]},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_report_compare_expects_other_numbers_of_other_recipes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = EXPECTED[name]
    one = folder(tmp_path / "one", made_by(1), **left)
    other = folder(tmp_path / "other", made_by(2), **right)
    assert main(["compare", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    assert "step 1 is the first that differs: loss is" in out
    assert "This is expected: " in out


def test_report_compare_same_layout_with_dropout_must_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = made_by(1)
    dropout = {"model__hidden_dropout": 0.1}
    one = folder(tmp_path / "one", lines, **dropout)
    other = folder(tmp_path / "other", [*lines[:30], *made_by(2)[30:]], **dropout)
    assert main(["compare", str(one), str(other)]) == 1
    assert "NOT equal, though no key that changes numbers differs: step 29" in (
        capsys.readouterr().out
    )


def test_report_compare_reads_damaged_and_foreign_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut the last line, repeat steps, add keys of another version, leave out all steps."""
    lines = made_by(1)
    one = folder(tmp_path / "one", lines)
    other = folder(tmp_path / "other", [*lines[:9], *rounded(lines, 1e-7)[5:]])
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    run = other / "run.yaml"
    run.write_text(run.read_text() + "later:\n  key_of_a_later_version: 1\n")
    assert main(["compare", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    assert "its run.yaml cannot be read by this version" in out
    assert "equal within the tolerances of `prove` in 40 steps" in out
    never = folder(tmp_path / "never", [])
    assert main(["compare", str(one), str(never)]) == 2
    assert "nothing is compared: the runs have no step in common" in capsys.readouterr().out
    assert main(["compare", str(one), str(tmp_path)]) == 2
    assert "MT524" in capsys.readouterr().err
