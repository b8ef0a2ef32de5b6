"""`check`: the problems of a configuration."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb, as_json, many
from mtrain.processes import without_collecting


@click.command(
    "check",
    cls=Verb,
    short_help="validate a configuration in under a second, without starting anything",
    usage=f"check {OVERRIDES} [FLAGS]",
    help=(
        "Validate a configuration in under a second, without starting anything. Reports every"
        " problem in one pass,\neach with a fix. Exit code 0 or 2."
    ),
    arguments=SETTINGS,
    examples=(
        ("check model=llama3_70b parallel=tp4pp4 cluster=h100x64", "would this run on 64 H100?"),
        ("check recipe=llama3/70b_h100x64 --json", "a recipe, as JSON"),
        (
            "check -m model=llama3_8b,llama3_70b parallel=tp4pp4,tp8 cluster=h100x64",
            "four combinations, a line each",
        ),
    ),
)
@as_json
@many
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="every model in every layout, precision and cluster that ships",
)
def check(words: list[str], as_json: bool, multirun: bool, everything: bool) -> int:
    """Validate one configuration, with -m every combination, with --all every choice."""
    if multirun:
        from mtrain.cli import multirun as sweep

        return sweep.check(words, as_json=as_json)
    if everything:
        from mtrain.cli import matrix

        return matrix.run(words, as_json=as_json)
    with without_collecting():
        from mtrain.cli import check as one

        return one.run(words, as_json=as_json)
