"""`explain`: a key, a group or a code."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb, as_json
from mtrain.cli.offers import first_explained


@click.command(
    "explain",
    cls=Verb,
    short_help="a key, who set it and what it feeds, or a code: explain parallel.tp, explain MT101",
    usage=f"explain KEY|GROUP|CODE {OVERRIDES}",
    help=(
        "Print what a key means, who set it and what it feeds in megatron-core; or what the code of"
        " a problem means."
    ),
    arguments=(
        (
            "KEY|GROUP|CODE",
            "such as parallel.tp, model or MT101; without one, all groups and codes",
        ),
        *SETTINGS,
    ),
    examples=(
        ("explain parallel.tp", "a key"),
        ("explain optim.lr recipe=llama3/70b_h100x64", "a key in a configuration"),
        ("explain MT101", "a code"),
    ),
    offers=first_explained,
)
@as_json
def explain(words: list[str], as_json: bool) -> int:
    """Explain the first word, in the configuration that the others describe."""
    from mtrain.cli import explain as verb

    return verb.run(words, as_json=as_json)
