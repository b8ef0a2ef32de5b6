"""`rehearse`: a layout on this machine, before a cluster."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb


@click.command(
    "rehearse",
    cls=Verb,
    short_help="run the layout on this machine, shrunk: train, save, resume, export, compare",
    usage=f"rehearse {OVERRIDES}",
    help=(
        "Run the layout on this machine, shrunk: train, save, resume, export, and compare the"
        " results bit by bit."
    ),
    arguments=SETTINGS,
    examples=(
        (
            "rehearse model=llama3_70b parallel=tp4pp4 cluster=h100x64",
            "before a week on a cluster",
        ),
    ),
)
def rehearse(words: list[str]) -> int:
    """Run the layout on this machine."""
    from mtrain.cli import rehearse as verb

    return verb.run(words)
