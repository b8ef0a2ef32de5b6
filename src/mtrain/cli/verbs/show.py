"""`show`: the resolved configuration."""

from __future__ import annotations

import click

from mtrain.cli.command import OVERRIDES, SETTINGS, Verb, as_json


@click.command(
    "show",
    cls=Verb,
    short_help="print the resolved configuration and who set each key",
    usage=f"show {OVERRIDES} [FLAGS]",
    help="Print the resolved configuration, and who set each key.",
    arguments=SETTINGS,
    examples=(
        ("show recipe=llama3/70b_h100x64", "what a recipe sets, line by line"),
        ("show --resolved optim.lr=3e-4", "a run in one file: redirect it, then use run=FILE"),
    ),
)
@as_json
@click.option("--resolved", is_flag=True, help="print the bare file that run=FILE reads")
@click.option(
    "--changed", is_flag=True, help="print only what differs from the defaults, as settings"
)
def show(words: list[str], as_json: bool, resolved: bool, changed: bool) -> int:
    """Print the resolved configuration."""
    from mtrain.cli import show as verb

    return verb.run(words, bare=resolved, changed=changed, as_json=as_json)
