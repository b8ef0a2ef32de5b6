"""`prove`: a layout against one rank."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb


@click.command(
    "prove",
    cls=Verb,
    short_help="train the layout and one rank from the same start, shrunk to this machine; compare",
    usage=f"prove {OVERRIDES}",
    help=(
        "Train the layout and one rank from the same weights on the same samples, shrunk to this"
        " machine,\nand compare losses, gradient norms, gradients and weights. The layout resumes"
        " halfway.\nExit code 5 where they differ; prove then names the first module that computes"
        " another result."
    ),
    arguments=SETTINGS,
    examples=(
        ("prove recipe=llama3/70b_h100x64", "its layout, with as many processes as fit here"),
    ),
)
def prove(words: list[str]) -> int:
    """Compare the layout with one rank."""
    from mtrain.cli import prove as verb

    return verb.run(words)
