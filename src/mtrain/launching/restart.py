"""Restarts of a run: after a failure its ranks start again, on all machines, in the same folder,
from the newest committed checkpoint.

The launcher has no state of the run but the furthest step, so a restart costs as much as a resume
without the imports. A step counts as reached once its line is in `metrics.jsonl`, or once a rank
that recorded its end was in a later one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from mtrain import strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import local as ckpt_local
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError, Preempted, TrainingError, warn
from mtrain.launching import resume
from mtrain.launching.supervise import Failure, Supervisor
from mtrain.launching.worker import record_name
from mtrain.plan.compare import METRICS
from mtrain.units import bytes_, number_of
from mtrain.world import faults
from mtrain.world.faults import Fault
from mtrain.world.stacks import ERRORS

# The file of a run folder with one line of JSON per restart
RESTARTS = "restarts.jsonl"
# Restarts in a row without a new step after which a run ends
FUTILE = 3
ADVICE = "resume with checkpoint.resume=latest"
# Bytes at the end of metrics.jsonl that hold its newest lines
TAIL = 1 << 16
MINUTE = 60.0


@dataclass(frozen=True)
class Memory:
    """The memory of ranks whose processes restart, by rank."""

    bytes_before: list[int]
    """Bytes that a rank held when it failed."""
    bytes_after: list[int]
    """Bytes that it holds with everything released."""
    survivors: list[int]
    """Modules and parameters of the model that something still refers to."""

    def words(self) -> str:
        """Return the memory of the rank that holds the most, as the end of a line."""
        most = max(range(len(self.bytes_after)), key=self.bytes_after.__getitem__)
        sizes = [bytes_(sizes[most]) for sizes in (self.bytes_before, self.bytes_after)]
        kept = sum(self.survivors)
        more = f"; {number_of(kept, 'object')} of the model could not be released" if kept else ""
        return f", in the same processes (memory of rank {most}: {sizes[0]}, now {sizes[1]}){more}"


class Starts(Protocol):
    """The place where ranks are started: this machine, or all machines of a run."""

    def supervisor(self, errors: Path) -> Supervisor:
        """Return the supervisor of one start, whose ranks leave their records in `errors`."""

    def start(self, attempts: Attempts, supervisor: Supervisor, known: int) -> None:
        """Train once; `known` is the size of `RESTARTS` at the beginning.

        Raises:
            MtrainError: the error of the first failing rank.
        """

    def replace_lost(self, failure: Failure) -> None:
        """Wait for the substitutes of lost machines.

        Raises:
            TrainingError: nothing came in time.
        """


@dataclass
class Attempts:
    """The starts of a run's ranks."""

    run: RunConfig
    home: Path
    checkpoint: Path | None
    """The checkpoint that the next start begins with."""
    weights: Path | None
    say: Callable[[str], None]
    injected: Sequence[Fault] = ()
    clock: Callable[[], float] = time.monotonic
    times: list[float] = field(default_factory=list)
    """The times of the restarts so far."""
    furthest: int = 0
    """The last step that any start has made."""
    futile: list[Failure] = field(default_factory=list)
    """The failures since the last start that made a new step, and the failure of that start."""
    seen: int = 0
    """Bytes of `RESTARTS` whose restarts are counted here."""

    def train(self, starts: Starts) -> None:
        """Train to the end, with as many restarts as `resilience` allows.

        Raises:
            MtrainError: the first error since the last new step, if no restart remains or would
                help.
            Preempted: stopped on request, also between two starts.
        """
        errors = self.home / ERRORS
        shutil.rmtree(errors, ignore_errors=True)
        self.furthest = step_in(self.checkpoint)
        known = _size(self.home / RESTARTS)
        self.seen = known
        while True:
            supervisor = starts.supervisor(errors)
            try:
                starts.start(self, supervisor, known)
                return
            except MtrainError as error:
                failure = supervisor.failure
                if failure is None or not failure.restart_helps:
                    raise
                # A run that would have been restarted is as resumable as one that has saved.
                if supervisor.stops and self.run.resilience.restarts:
                    raise Preempted(f"stopped on request, and not restarted: {error}") from None
                self.prepare(failure, replace_lost=starts.replace_lost)

    def prepare(
        self,
        failure: Failure,
        memory: Memory | None = None,
        replace_lost: Callable[[Failure], None] = lambda _: None,
    ) -> None:
        """Prepare the next start; `memory` is that of ranks whose processes go on, and
        `replace_lost` waits for the substitutes of lost machines.

        Raises:
            MtrainError: there is none.
        """
        self._count_others()
        reached = max(self.furthest, _last_step(self.home / METRICS), failure.step - 1)
        if reached > self.furthest:
            self.futile.clear()
        self.furthest = reached
        self.futile.append(failure)
        self._refuse()
        # First: the files of its machine decide where the run continues.
        replace_lost(failure)
        root = self.home / CHECKPOINTS
        with suppress(OSError):
            ckpt_folder.sweep(root)
        notes: list[str] = []
        try:
            newest = resume.newest(self.home, notes)
        except OSError as error:  # a disk that is gone must not hide what failed first
            raise failure.error from error
        # Imported weights are a checkpoint of step 0, from which nothing but weights is taken.
        if newest is not None and newest != self.weights:
            self.checkpoint = newest
        begun = step_in(self.checkpoint)
        # A later one was passed over: the newest local one would be taken for older than it.
        ckpt_local.forget_after(self.home, begun)
        for note in notes:
            self.say(note)
        self.times.append(self.clock())
        self.injected = faults.left(self.injected, max(failure.step, reached))
        self._record(failure, _put_aside(self.home / ERRORS, len(self.times)), memory)

    def _count_others(self) -> None:
        """Count the restarts that another process of this launch has noted: rank 0 those of the
        launcher, and the launcher those within the ranks.
        """
        path = self.home / RESTARTS
        if _size(path) <= self.seen:
            return
        with path.open("rb") as file:
            file.seek(self.seen)
            lines = file.read().splitlines()
        self.seen = _size(path)
        for line in map(json.loads, lines):
            checkpoint = line["checkpoint"] and Path(line["checkpoint"])
            reached = step_in(checkpoint) + line["steps_lost"]
            if reached > self.furthest:
                self.futile.clear()
            self.furthest = max(self.furthest, reached)
            text = line["error"]
            name = record_name(line["rank"])
            # where `_refuse` expects it; a rank that was killed left none
            recorded = (self.home / line["records"] / name).is_file()
            details = f"; details in {self.home / ERRORS / name}" if recorded else ""
            error = TrainingError(f"{text}{details}")
            self.futile.append(
                Failure(line["rank"], line["kind"], text, error, line["step"], restart_helps=True)
            )
            ago = datetime.now(UTC) - datetime.fromisoformat(line["time"])
            self.times.append(self.clock() - ago.total_seconds())

    def _refuse(self) -> None:
        """Raise the first error since the last new step if no restart remains."""
        limit = self.run.resilience.restarts
        first = self.futile[0]
        if not limit:
            raise first.error
        window = self.run.resilience.restart_window
        since = None if window is None else self.clock() - window * MINUTE
        recent = len([at for at in self.times if since is None or at > since])
        if len(self.futile) > FUTILE:
            why = f"{FUTILE} restarts made no step after step {self.furthest}"
        elif recent >= limit:
            period = "" if window is None else f" within {window:g} minutes"
            why = f"all {limit} restarts (resilience.restarts){period} are used"
        else:
            return
        text = str(first.error)
        if len(self.futile) > 1:
            number = len(self.times) - len(self.futile) + 2
            errors = self.home / ERRORS
            text = text.replace(str(errors), str(_aside(errors, number)))
        raise TrainingError(text, f"  not restarted: {why}") from None

    def _record(self, failure: Failure, records: Path, memory: Memory | None) -> None:
        """Report a restart in one line, and note it in the run folder."""
        number = len(self.times)
        step = failure.step or self.furthest + 1
        begun = step_in(self.checkpoint)
        lost = max(0, self.furthest - begun)
        body = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "restart": number,
            "of": self.run.resilience.restarts,
            "rank": failure.rank,
            "kind": failure.kind,
            "error": failure.text,
            "step": step,
            "checkpoint": None if self.checkpoint is None else _named(self.checkpoint, self.home),
            "steps_lost": lost,
            "records": str(records.relative_to(self.home)),
            "in_process": memory is not None,
        }
        if memory is not None:
            body |= asdict(memory)
        try:
            with (self.home / RESTARTS).open("a", encoding="utf-8") as file:
                file.write(strict_json.dumps(body) + "\n")
            self.seen = _size(self.home / RESTARTS)
        except OSError as error:
            warn(f"{self.home / RESTARTS} cannot be written: {error.strerror}")
        text = failure.text.removesuffix(f"; {ADVICE}")
        earlier = self.futile[:-1]
        if earlier and _is_same(earlier[-1], failure):
            text = f"rank {failure.rank} failed alike"
        origin = "the beginning" if self.checkpoint is None else self.checkpoint.name
        if self.checkpoint is not None and ckpt_local.holds(self.home, self.checkpoint):
            origin = f"local {origin}"
        self.say(
            f"restart {number} of {self.run.resilience.restarts}: {text} (step {step}); continuing"
            f" from {origin}, {number_of(lost, 'step')} lost{memory.words() if memory else ''}"
        )


def step_in(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint, 0 for the beginning."""
    return 0 if checkpoint is None else ckpt_folder.step_of(checkpoint)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _named(path: Path, home: Path) -> str:
    """Return a path relative to the run folder, if it is in there."""
    return str(path.relative_to(home) if path.is_relative_to(home) else path)


def _is_same(one: Failure, other: Failure) -> bool:
    return (one.rank, one.kind, one.step) == (other.rank, other.kind, other.step)


def _aside(errors: Path, number: int) -> Path:
    """Return the folder of the records before restart `number`."""
    return errors / f"restart_{number}"


def _put_aside(errors: Path, number: int) -> Path:
    """Move the records of a failed start into its own folder, and return it."""
    folder = _aside(errors, number)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for file in [path for path in errors.iterdir() if path.is_file()]:
            os.replace(file, folder / file.name)
    return folder


def _last_step(metrics: Path) -> int:
    """Return the last step of a metrics file; 0 if it has none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return 0
    return max(map(_step_of, lines), default=0)


def _step_of(text: bytes) -> int:
    try:
        line: dict[str, Any] = json.loads(text)
        return int(line["step"]) if "lr" in line else 0
    except (ValueError, TypeError, KeyError):  # the end of a longer line, or a line cut short
        return 0
