"""`resume`: continue a run."""

from __future__ import annotations

import click

from mtrain.cli.command import DEBUG, RUN, Verb
from mtrain.cli.offers import first_a_run
from mtrain.config.compose.paths import program


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
    """Train on with the configuration in a run folder, under the further words.

    Raises:
        ConfigError: no folder is given, or it is neither a run nor a checkpoint.
    """
    from mtrain.cli import train
    from mtrain.loading.checkpoints import beneath, quoted, relaid, run_file, target_of

    usage = f"{program()} resume runs/<name> [overrides]"
    target, overrides = target_of(words, "resume", usage)
    given = [f"run={run_file(target)}", f"checkpoint.resume={quoted(target)}"]
    return train.run([*given, *beneath(relaid(overrides), overrides)], debug=debug)
