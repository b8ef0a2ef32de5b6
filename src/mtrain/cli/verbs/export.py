"""`export`: the weights of a checkpoint as whole tensors."""

from __future__ import annotations

import click

from mtrain.cli.command import RUN, Verb
from mtrain.cli.offers import only_a_run


@click.command(
    "export",
    cls=Verb,
    short_help="write the weights of a checkpoint as whole tensors: export RUN_FOLDER OUT_FOLDER",
    usage="export RUN OUT",
    help="Write the weights of a checkpoint as whole tensors in safetensors files.",
    arguments=(RUN, ("OUT", "a new folder")),
    examples=(("export runs/NAME weights", "its newest checkpoint"),),
    path_at=0,
    offers=only_a_run,
)
def export(words: list[str]) -> int:
    """Write the weights of a checkpoint."""
    from mtrain.cli import export as verb

    return verb.run(words)
