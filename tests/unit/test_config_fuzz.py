"""Seeded nonsense: every input ends in a configuration or in problems, never in a traceback, and never slowly."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mtrain.cli.setup import load
from mtrain.config.keys import schema_keys
from mtrain.config.paths import recipes_dir
from mtrain.errors import BadInput, Problem
from tests.support.configs import LAPTOP

KEYS = [*schema_keys(), "model", "parallel", "recipe", "run", "hydra", "model.moe", "foo.bar", "model.moe.x.y"]
VALUES = (
    "",
    "0",
    "-1",
    "2.5",
    "nan",
    "1e400",
    "null",
    "true",
    "[1,2]",
    "{a: 1}",
    "a b",
    "'x'",
    '"',
    "~nobody/x",
    "a\0b",
    "${model.name}",
    "${x",
    "1,2",
    "range(1)",
    "tp-1",
    "../x",
    "x" * 300,
    "9" * 5000,
    "[[[",
    "\\'",
    "é\u202e",
    "extend_list(1)",
)
PIECES = (
    *("_target_", "${oc.env:HOME}", "!!python/name:os.system", "&a", "*a", "null", "-1", "1e99", "nan", "[]", "{}"),
    *("\t", "  ", "- ", "override /", "\u202e", "\0", "9" * 400, "'", '"', ":", "<<", "?", "|", "hydra", "..", "~"),
)


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        at, lines = rng.randrange(len(text) + 1), text.splitlines()
        row = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + rng.randint(1, 8) :]
            case 2:
                lines[row] = f"{lines[row].split(':')[0]}: {rng.choice(PIECES)}"
                text = "\n".join(lines) + "\n"
            case _:
                lines.insert(rng.randrange(len(lines)), lines[row])
                text = "\n".join(lines) + "\n"
    return text


def judged(argv: list[str]) -> None:
    start = time.perf_counter()
    problems: tuple[Problem, ...] | None = None
    try:
        load(argv, LAPTOP, {})
    except BadInput as error:
        problems = error.problems
    assert problems != ()
    assert all(problem.rule and (problem.path or problem.source) for problem in problems or ())
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_recipe_is_judged(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    recipes = [file.read_text() for file in sorted(recipes_dir().rglob("*.yaml"))]
    for _ in range(60):
        (tmp_path / "r.yaml").write_text(mutated(rng.choice(recipes), rng))
        judged([f"recipe={tmp_path / 'r.yaml'}"])


def test_nonsense_on_the_command_line_is_judged() -> None:
    rng = random.Random(1)
    for _ in range(250):
        signs = ("=", "=", "=", "", "==", "@a=", "/b=", ":")
        judged([f"{rng.choice(KEYS)}{rng.choice(signs)}{rng.choice(VALUES)}" for _ in range(rng.randint(1, 3))])
