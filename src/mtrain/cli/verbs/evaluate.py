"""`evaluate`: the loss of a checkpoint, or its results in tasks."""

from __future__ import annotations

import click

from mtrain.cli.command import RUN, Verb, as_json
from mtrain.cli.offers import run_then

ARGUMENTS = (
    RUN,
    ("limit=N", "at most so many samples, or requests of each task (all)"),
    ("tasks=NAME", "a task, several with commas, or a .yaml of your own"),
    ("shots=N", "examples before each request of a task (the default of the task)"),
    ("batch=N", "so many requests of a task at once (8)"),
    ("KEY=VALUE", "other data, another layout or kernel"),
)
OWN = [f"{name.partition('=')[0]}=" for name, _ in ARGUMENTS if name[0].islower()]


@click.command(
    "evaluate",
    cls=Verb,
    short_help="loss, perplexity and bits per byte of a checkpoint, or its results in tasks",
    usage="evaluate RUN [limit=N] [tasks=NAME] [KEY=VALUE ...] [FLAGS]",
    help=(
        "Print loss, perplexity, bits per token and per byte on the validation split of the run's"
        " data,\nor of other data; with tasks, the results in tasks of lm-evaluation-harness (pip"
        " install 'mtrain[eval]')."
    ),
    arguments=ARGUMENTS,
    examples=(
        ("evaluate runs/NAME", "over the whole validation split"),
        (
            "evaluate runs/NAME data.path=other limit=1000 parallel=tp2 --json",
            "other data, sharded",
        ),
        ("evaluate runs/NAME tasks=hellaswag,arc_easy limit=100", "tasks"),
    ),
    path_at=0,
    offers=run_then(OWN),
)
@as_json
def evaluate(words: list[str], as_json: bool) -> int:
    """Print the loss of a checkpoint, or its results in tasks."""
    from mtrain.cli import evaluate as verb

    return verb.run(words, as_json=as_json)
