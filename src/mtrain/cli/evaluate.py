"""`evaluate RUN`: the losses of a checkpoint, or its results on lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from mtrain.cli.named_values import Word, read_words, texts, whole
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import program
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
    "limit": whole(None, 1, 10**12, "100"),
    "tasks": Word((), lambda text: ",".join(texts(text)).split(","), many=True),
    "shots": replace(whole(None, 0, 1000, "5"), aka=("num_fewshot", "fewshot")),
    "batch": whole(8, 1, 4096, "8", "a whole number from 1 to 4096"),
}


def run(words: list[str], *, as_json: bool = False) -> int:
    """Print the cross entropy of a checkpoint on a validation split, or its results in tasks."""
    target, rest = target_of(words, "evaluate", USAGE)
    own, overrides = read_words(rest, WORDS)
    tasks = tuple(name for name in own["tasks"] if name)
    checkpoint_of(target, USAGE)
    # Tasks bring their own text, so the data of the run need not be on this machine.
    unused = WITHOUT_DATA if tasks else ("trainer.sample_tokens=0", WITHOUT_START)
    said = [f"run={run_file(target)}", *beneath([*unused, *relaid(target, overrides)], overrides)]
    composed = load(said)
    say_replaced(composed)
    preflight.check(composed.run, said)
    if not tasks:
        home, checkpoint = checkpoint_of(target, USAGE)
        file = home / "tokenizer.json"
        tokenizer = file if file.is_file() else None
        local.evaluate(composed.run, checkpoint, tokenizer, own["limit"], as_json)
        return 0
    require_writing(composed.run)
    if find_spec("lm_eval") is None:
        rule = "tasks are those of lm-evaluation-harness, which is not installed"
        raise refusal(rule, "pip install 'mtrain[eval]'", "MT510", "tasks", list(tasks))
    questions = Questions(tasks, own["limit"], own["shots"], own["batch"])
    local.answer(composed.run, source_of(target, USAGE), questions, as_json)
    return 0
