"""`train`: the verb of a command line without one."""

from __future__ import annotations

import click

from mtrain.cli.command import DEBUG, OVERRIDES, SETTINGS, Verb, many


@click.command(
    "train",
    cls=Verb,
    short_help="train; the default verb",
    usage=f"[train] {OVERRIDES} [FLAGS]",
    help=(
        "Validate the configuration, prepare the data, start the ranks and train; leaves a folder"
        " under runs/.\nThis is the verb of a command without one. Under torchrun the process is"
        " one rank of the run."
    ),
    arguments=SETTINGS,
    examples=(
        ("train", "the default model on this machine"),
        ("model=llama_tiny parallel=tp2pp2 trainer.train_iters=20", "another layout, fewer steps"),
        ("-m optim.lr=1e-3,3e-3 parallel=tp2,pp2", "four runs, and a table of their results"),
    ),
)
@many
@click.option("--json", "as_json", is_flag=True, help="with -m: print the table as JSON")
@click.option("--debug", is_flag=True, help=DEBUG)
def train(words: list[str], multirun: bool, as_json: bool, debug: bool) -> int:
    """Train one configuration, or with -m every combination."""
    if multirun:
        from mtrain.cli import multirun as sweep
        from mtrain.cli.main import main

        return sweep.train(words, main, debug=debug, as_json=as_json)
    from mtrain.cli import train as one

    return one.run(words, debug=debug)
