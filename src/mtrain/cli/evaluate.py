"""`evaluate RUN`: how well a checkpoint predicts text, or answers the tasks of
lm-evaluation-harness.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mtrain.cli.named_values import Word, number, read_words, texts
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem
from mtrain.launching import local, preflight
from mtrain.loading.checkpoints import (
    WITHOUT_DATA,
    WITHOUT_START,
    beneath,
    checkpoint_of,
    relaid,
    require_writing,
    run_file,
    source_of,
    target_of,
)
from mtrain.loading.configuration import load, say_replaced
from mtrain.train.generate.request import Questions

USAGE = f"{program()} evaluate runs/<name> [limit=N] [tasks=NAME] [overrides]"
WORDS = {
    "limit": Word(None, number(int, 1, 1e12), "a whole number of at least 1", "limit=100"),
    "tasks": Word(
        (), lambda text: [name for one in texts(text) for name in one.split(",")], many=True
    ),
    "shots": Word(
        None,
        number(int, 0, 1000),
        "a whole number of at least 0",
        "shots=5",
        aka=("num_fewshot", "fewshot"),
    ),
    "batch": Word(8, number(int, 1, 4096), "a whole number from 1 to 4096", "batch=8"),
}


def run(argv: list[str], *, as_json: bool = False) -> int:
    """Print the cross entropy of a checkpoint on a validation split, or its results in tasks."""
    target, rest = target_of(argv, "evaluate", USAGE)
    words, overrides = read_words(rest, WORDS)
    tasks = tuple(name for name in words["tasks"] if name)
    checkpoint_of(target, USAGE)
    own = WITHOUT_DATA if tasks else ("trainer.sample_tokens=0", WITHOUT_START)
    said = [f"run={run_file(target)}", *beneath([*own, *relaid(overrides)], overrides)]
    composed = load(said)
    say_replaced(composed)
    preflight.check(composed.run, said)
    if not tasks:
        home, checkpoint = checkpoint_of(target, USAGE)
        local.evaluate(
            composed.run, checkpoint, _if_there(home / "tokenizer.json"), words["limit"], as_json
        )
        return 0
    require_writing(composed.run)
    if find_spec("lm_eval") is None:
        rule = "tasks are those of lm-evaluation-harness, which is not installed"
        raise ConfigError(
            [
                Problem(
                    "MT510", "tasks", list(tasks), rule, "pip install 'mtrain[eval]'", COMMAND_LINE
                )
            ]
        )
    questions = Questions(tasks, words["limit"], words["shots"], words["batch"])
    local.answer(composed.run, source_of(target, USAGE), questions, as_json)
    return 0


def _if_there(file: Path) -> Path | None:
    return file if file.is_file() else None
