"""`export RUN OUT`: the weights of a checkpoint as whole tensors, for whatever comes after
training.
"""

from __future__ import annotations

from pathlib import Path

from mtrain.ckpt import folder as ckpt_folder
from mtrain.cli.resume import target_of
from mtrain.config.compose.paths import CHECKPOINTS, program
from mtrain.errors import ConfigError, Problem, say
from mtrain.units import bytes_, count

USAGE = f"{program()} export runs/<name> OUT_FOLDER"


def run(argv: list[str]) -> int:
    """Write the newest checkpoint of a run, or the checkpoint named, to a new folder; returns the
    exit code.
    """
    target, rest = target_of(argv, "export", USAGE)
    if len(rest) != 1 or "=" in rest[0]:
        raise ConfigError([Problem("MT002", "", None, "export needs the folder to write", USAGE)])
    out = Path(rest[0]).expanduser()
    checkpoint = newest(target)
    if out.exists():
        raise ConfigError(
            [Problem("MT507", "", None, f"{out} is there; export writes a new folder", f"{out}-2")]
        )
    from mtrain.launching.local import install_reader

    install_reader()  # the reader of checkpoints speaks of megatron-core's tensors
    from mtrain.ckpt.export import export
    from mtrain.ckpt.store import Checkpoint

    tokenizer = (
        target.parent.parent if target.parent.name == CHECKPOINTS else target
    ) / "tokenizer.json"
    done = export(Checkpoint.open(checkpoint), out, tokenizer if tokenizer.is_file() else None)
    size = sum(file.stat().st_size for file in done.files)
    padding = f"; {done.padding}" if done.padding else ""
    held = f"{done.tensors} tensors, {count(done.elements)} numbers"
    say(f"exported {checkpoint}: {held}, {bytes_(size)} in {out}{padding}")
    return 0


def newest(target: Path) -> Path:
    """Return the newest checkpoint of a run folder, or the checkpoint folder itself.

    Raises:
        ConfigError: the run has none yet.
    """
    if target.parent.name == CHECKPOINTS or (target / ckpt_folder.MANIFEST).is_file():
        return target
    saved = ckpt_folder.committed(target / CHECKPOINTS)
    if not saved:
        raise ConfigError([Problem("MT502", "", None, f"{target} has no checkpoint yet", USAGE)])
    return saved[-1]
