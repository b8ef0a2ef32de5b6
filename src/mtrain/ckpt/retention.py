"""The checkpoints of a run that `checkpoint.keep` deletes, and those that stay all the same.

Needs no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mtrain.ckpt import folder


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is older than the newest `keep`, and stays."""

    path: Path
    why: str


@dataclass(frozen=True)
class Retention:
    """The fate of the checkpoints of a run."""

    newest: tuple[Path, ...]
    doomed: tuple[Path, ...]
    kept: tuple[Kept, ...]


def retention(
    committed: Collection[Path],
    keep: int | None,
    *,
    complete: Collection[Path],
    named: Collection[Path] = (),
    read: Collection[Path] = (),
) -> Retention:
    """Return which of the committed checkpoints are deleted.

    Args:
        committed: all of a run, oldest first.
        keep: the newest to keep; None: all.
        complete: those whose files are all as large as they were written.
        named: those that another run's configuration names.
        read: those that a process reads.
    """
    every = list(committed)
    newest = every if keep is None else every[-keep:]
    # A run without a complete checkpoint could not continue.
    last = [path for path in every if path in complete][-1:]
    needed = [] if any(path in complete for path in newest) else last
    why = {
        **dict.fromkeys(named, "another run starts from it"),
        **dict.fromkeys(needed, "it is the only complete one that is left"),
        **dict.fromkeys(read, "a process reads it"),
    }
    older = every[: len(every) - len(newest)]
    kept = tuple(Kept(path, why[path]) for path in older if path in why)
    return Retention(tuple(newest), tuple(path for path in older if path not in why), kept)


def prune(root: Path, keep: int | None) -> None:
    """Delete the older checkpoints of a run that has just committed one, and those of a course that
    it has left.
    """
    folder.sweep(root)
    doomed = list(root.glob(".superseded-*"))
    every = folder.committed(root)
    read = [path for path in every if folder.is_read(path)]
    # The newest is complete: it was written a moment ago, so no other has to stay in its place.
    for path in retention(every, keep, complete=every[-1:], read=read).doomed:
        doomed.append(folder.hidden(path))
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has its manifest, and every file in the size of that."""
    from mtrain.errors import MtrainError

    try:
        folder.read_manifest(path, verify=False)
    except MtrainError:
        return False
    return True
