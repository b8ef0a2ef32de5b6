"""`resume`: continue a run."""

from __future__ import annotations

import click

from mtrain.cli.command import DEBUG, RUN, Verb
from mtrain.cli.offers import first_a_run


@click.command(
    "resume",
    cls=Verb,
    short_help="continue a run: resume RUN_FOLDER [overrides]",
    usage="resume RUN [KEY=VALUE ...]",
    help=(
        "Continue a run from its newest checkpoint, with the configuration in its folder. Set"
        " trainer.train_iters\nto make it longer; if that changes a learning rate that has begun"
        " to decay, mtrain reports how, and\ncheckpoint.accept_changes=true continues with the"
        " change."
    ),
    arguments=(RUN, ("KEY=VALUE", "what changes from here on")),
    examples=(
        ("resume runs/NAME", "to the end that it had"),
        ("resume runs/NAME parallel=tp4", "in another layout"),
        (
            "resume runs/NAME trainer.train_iters=2000 checkpoint.accept_changes=true",
            "longer, with the learning rate as it decays now",
        ),
    ),
    path_at=0,
    offers=first_a_run,
)
@click.option("--debug", is_flag=True, help=DEBUG)
def resume(words: list[str], debug: bool) -> int:
    """Continue a run."""
    from mtrain.cli import resume as verb

    return verb.run(words, debug=debug)
