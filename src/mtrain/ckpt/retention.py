"""The checkpoints of a run that `checkpoint.keep` deletes, and those that stay all the same.

Needs no torch.

The loss of a checkpoint is read from `metrics.jsonl`, because a run saves a step before it
evaluates it. A resumed run removes the lines of steps that it makes again, so the file always
belongs to the checkpoints next to it. A checkpoint without an evaluation at its own step counts
with the last one before it; of several with the same loss, the oldest is the nearest to that
evaluation, and stays.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.ckpt import folder, sources
from mtrain.config.compose.paths import METRICS, RUN_FILE

if TYPE_CHECKING:
    # The process that writes checkpoints imports this module, and needs no schema.
    from mtrain.config.schema.checkpoint import UnresolvedCheckpoint

MOST_RUNS = 10_000
"""Runs next to this one whose configurations are looked through for its checkpoints."""
NEWEST = "one of the newest"


@dataclass(frozen=True)
class Policy:
    """The checkpoints that a run keeps: `checkpoint.keep`, `keep_every` and `keep_best`."""

    keep: int | None
    """The newest to keep; None: all."""
    every: int | None = None
    """Checkpoints of steps that are multiples of it stay."""
    best: str | None = None
    """The metric whose lowest checkpoint stays."""

    @classmethod
    def of(cls, section: UnresolvedCheckpoint) -> Policy:
        """Return the policy that a run is configured with."""
        return cls(section.keep, section.keep_every, section.keep_best)


@dataclass(frozen=True)
class Kept:
    """A checkpoint that stays."""

    path: Path
    why: str


@dataclass(frozen=True)
class Retention:
    """The fate of the checkpoints of a run."""

    newest: tuple[Kept, ...]
    doomed: tuple[Path, ...]
    kept: tuple[Kept, ...]
    """Older ones than the newest `keep` that stay."""


def retention(
    committed: Collection[Path],
    policy: Policy,
    *,
    complete: Collection[Path],
    losses: Mapping[int, float] | None = None,
    named: Collection[Path] = (),
    read: Collection[Path] = (),
) -> Retention:
    """Return which of the committed checkpoints are deleted.

    Args:
        committed: all of a run, oldest first.
        policy: the checkpoints to keep.
        complete: those whose files are all as large as they were written.
        losses: step -> value of `policy.best` in the evaluation after it.
        named: those that another run's configuration names.
        read: those that a process reads.
    """
    every = list(committed)
    newest = every if policy.keep is None else every[-policy.keep :]
    # A run without a complete checkpoint could not continue.
    last = [path for path in every if path in complete][-1:]
    needed = [] if any(path in complete for path in newest) else last
    permanent = [
        path for path in every if policy.every and (step := _step(path)) and not step % policy.every
    ]
    why: dict[Path, list[str]] = {}
    for paths, reason in (
        (newest, NEWEST),
        (permanent, f"step is a multiple of {policy.every}"),
        *(_best(every, policy.best, losses or {}) if policy.best else ()),
        (named, "another run starts from it"),
        (needed, "it is the only complete one that is left"),
        (read, "a process reads it"),
    ):
        for path in paths:
            why.setdefault(path, []).append(reason)
    stay = [Kept(path, "; ".join(why[path])) for path in every if path in why]
    return Retention(
        tuple(kept for kept in stay if kept.path in newest),
        tuple(path for path in every if path not in why),
        tuple(kept for kept in stay if kept.path not in newest),
    )


def _step(path: Path) -> int:
    return folder.step_of(path)


def _best(
    every: Collection[Path], metric: str, losses: Mapping[int, float]
) -> list[tuple[list[Path], str]]:
    """Return the checkpoint with the lowest loss, and the loss in words; none without a loss."""
    evaluated = sorted(losses)
    found: tuple[float, Path, int] | None = None
    for path in every:
        at = max((step for step in evaluated if step <= _step(path)), default=None)
        if at is not None and (found is None or losses[at] < found[0]):
            found = losses[at], path, at
    if found is None:
        return []
    loss, path, at = found
    where = "" if at == _step(path) else f" (of step {at})"
    return [([path], f"best {metric} {loss:.4g}{where}")]


@dataclass
class Evaluations:
    """The evaluations in the metrics of a run; each reading goes on where the last one ended."""

    path: Path
    metric: str
    losses: dict[int, float] = field(default_factory=dict)
    """Step -> the metric, where it is a finite number."""
    _at: int = 0

    def read(self) -> Mapping[int, float]:
        """Return all evaluations so far; none where the file cannot be read."""
        key = f'"{self.metric}"'.encode()
        with suppress(OSError), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._at:
                self._at = 0
                self.losses.clear()
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                # Nearly all lines are of steps, and need no parser.
                if key in line:
                    self._note(line)
        return self.losses

    def _note(self, line: bytes) -> None:
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                step = found.get("step")
                loss = found.get(self.metric)
                if isinstance(step, int) and isinstance(loss, int | float) and math.isfinite(loss):
                    self.losses[step] = float(loss)


@cache
def evaluations(root: Path, metric: str) -> Evaluations:
    """Return the evaluations of the run whose checkpoints are in `root`."""
    return Evaluations(root.parent / METRICS, metric)


def losses_of(root: Path, policy: Policy) -> Mapping[int, float]:
    """Return the losses that decide about checkpoints in `root`, by step; none if none do."""
    return evaluations(root, policy.best).read() if policy.best else {}


def prune(root: Path, policy: Policy) -> None:
    """Delete older checkpoints of a run that has just committed one, and of abandoned courses."""
    folder.sweep(root)
    doomed = [path for path in root.glob(".superseded-*") if not folder.is_read(path)]
    every = folder.committed(root)
    if policy.keep is not None and len(every) > policy.keep:
        # The newest is complete: it was written a moment ago, so no other has to stay in its place.
        found = retention(
            every,
            policy,
            complete=every[-1:],
            losses=losses_of(root, policy),
            named=named_by_others(root, every),
            read=[path for path in every if folder.is_read(path)],
        )
        doomed += [gone for path in found.doomed if (gone := folder.hidden(path)) is not None]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)


def named_by_others(root: Path, every: Collection[Path]) -> list[Path]:
    """Return the checkpoints in `root` that the configuration of a neighbouring run starts from."""
    home = root.absolute().parent
    places = "|".join(re.escape(str(place)) for place in {root.absolute(), root.resolve()})
    names: set[str] = set()
    for file in islice(home.parent.glob(f"*/{RUN_FILE}"), MOST_RUNS):
        if file.parent.name != home.name:
            with suppress(OSError, ValueError):
                status = file.stat()
                names |= _names_in(file, places, status.st_mtime_ns, status.st_size)
    return [path for path in every if path.name in names]


@cache
def _names_in(file: Path, places: str, written: int, size: int) -> frozenset[str]:
    """Return names of checkpoints at `places` in a file, which is read once unless it changes.

    Raises:
        OSError, ValueError: it cannot be read, or is no text.
    """
    return frozenset(re.findall(rf"(?:{places})/(step_\d+)", file.read_text()))


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has its manifest, and every file in the size of that.

    A folder that stands for one in an object store counts, without a request: no save waits for it.
    """
    from mtrain.errors import MtrainError

    try:
        if sources.address_of(path) is None:
            folder.read_manifest(path, verify=False)
        else:
            folder.parse_manifest(path)
    except MtrainError:
        return False
    return True
