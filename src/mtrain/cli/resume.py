"""`resume RUN`: go on with a run, by its folder or one of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli import train
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, Problem

USAGE = f"{program()} resume runs/<name> [overrides]"


def run(argv: list[str], *, debug: bool) -> int:
    """Train on with the configuration that the run folder holds; further arguments are
    overrides.
    """
    target, overrides = target_of(argv, "resume", USAGE)
    words = [f"run={run_file(target)}", f"checkpoint.resume={quoted(target)}"]
    return train.run([*words, *beneath(relaid(overrides), overrides)], debug=debug)


def relaid(overrides: list[str]) -> list[str]:
    """What another layout decides anew: the size of a micro-batch was resolved for the layout of
    the run.
    """
    if any(word.startswith("parallel") for word in overrides):
        return ["trainer.micro_batch_size=null"]
    return []


def beneath(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides, after those of our own `words` whose keys they do not set."""
    said = {word.partition("=")[0] for word in overrides}
    return [*(word for word in words if word.partition("=")[0] not in said), *overrides]


def target_of(argv: list[str], verb: str, usage: str) -> tuple[Path, list[str]]:
    """Return the run or checkpoint folder that a verb was given first, and the rest of its
    arguments.

    Raises:
        ConfigError: no folder was given, or it is neither a run nor a checkpoint.
    """
    if not argv or "=" in argv[0]:
        raise ConfigError(
            [Problem("MT002", "", None, f"{verb} needs a run folder or a checkpoint folder", usage)]
        )
    target = Path(argv[0]).expanduser()
    if not (target / ckpt_folder.RUN_FILE).is_file():
        what = "does not exist" if not target.exists() else f"has no {ckpt_folder.RUN_FILE}"
        raise ConfigError(
            [
                Problem(
                    "MT502",
                    "",
                    None,
                    f"{target} {what}; {verb} needs a run or checkpoint folder",
                    usage,
                )
            ]
        )
    return target, argv[1:]


def run_file(target: Path) -> str:
    """Return the configuration of a run or checkpoint folder, as an override's value."""
    return quoted(target / ckpt_folder.RUN_FILE)


def quoted(path: Path) -> str:
    """Return a path as a value in override grammar."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
