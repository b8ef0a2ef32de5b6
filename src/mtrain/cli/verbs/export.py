"""`export`: the weights of a checkpoint as whole tensors."""

from __future__ import annotations

from pathlib import Path

import click

from mtrain.cli.command import RUN, Verb
from mtrain.cli.offers import only_a_run
from mtrain.config.compose.paths import CHECKPOINTS, program
from mtrain.errors import ConfigError, Problem, say
from mtrain.units import bytes_, count


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
    """Write the newest checkpoint of a run, or a named one, to a new folder.

    Raises:
        ConfigError: the run has no checkpoint, or the new folder is missing or exists.
    """
    from mtrain.loading.checkpoints import newest, target_of

    usage = f"{program()} export runs/<name> OUT_FOLDER"
    target, rest = target_of(words, "export", usage)
    if len(rest) != 1 or "=" in rest[0]:
        raise ConfigError([Problem("MT002", "", None, "export needs the folder to write", usage)])
    out = Path(rest[0]).expanduser()
    checkpoint = newest(target, usage)
    if out.exists():
        rule = f"{out} exists; export writes a new folder"
        raise ConfigError([Problem("MT507", "", None, rule, f"{out}-2")])
    from mtrain.launching.local import install_reader

    install_reader()  # checkpoints hold tensors of megatron-core
    from mtrain.ckpt.export import export as write
    from mtrain.ckpt.store import Checkpoint

    home = target.parent.parent if target.parent.name == CHECKPOINTS else target
    tokenizer = home / "tokenizer.json"
    done = write(Checkpoint.open(checkpoint), out, tokenizer if tokenizer.is_file() else None)
    size = sum(file.stat().st_size for file in done.files)
    padding = f"; {done.padding}" if done.padding else ""
    held = f"{done.tensors} tensors, {count(done.elements)} numbers"
    say(f"exported {checkpoint}: {held}, {bytes_(size)} in {out}{padding}")
    return 0
