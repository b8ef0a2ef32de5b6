"""The files of the event stream, and the thread that writes them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.errors import warn

FOLDER = "events"
FORMAT = 1
START = "start"
STEP = "step"
EVALUATION = "evaluation"
STATISTICS = "statistics"
CHECKPOINT = "checkpoint"
RESTART = "restart"
WARNING = "warning"
ALERT = "alert"
MEMORY = "memory"
ANOMALY = "anomaly"
STRAGGLER = "straggler"
OWN_TIME = "own_time"
DROPPED = "dropped"
END = "end"
MOST_HELD = 10_000
"""Lines of a file that wait for a disk; further ones are dropped and counted."""
RETRY_S = 1.0
CLOSE_S = 10.0
"""Seconds that the end of a run waits for a disk."""

Line = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


@dataclass
class Journal:
    """A file that lines are appended to, and the lines that wait for it."""

    path: Path
    line_of: Line
    """Returns the line of an event, or None if the file has none of it."""

    def __post_init__(self) -> None:
        self.held: deque[Mapping[str, Any]] = deque()
        self.rest = b""
        """The bytes of a line that the disk has not taken yet."""
        self.dropped = 0
        self.noted = 0
        """Dropped lines that an event of the file counts."""
        self.descriptor: int | None = None
        self.retry_at = 0.0

    def hold(self, event: Mapping[str, Any]) -> None:
        """Keep the line of an event until the disk takes it."""
        line = self.line_of(event)
        if line is None:
            return
        if len(self.held) < MOST_HELD:
            self.held.append(line)
        else:
            self.dropped += 1

    def note_gap(self) -> None:
        """Keep an event after the gap that counts the lines dropped in it."""
        missing = self.dropped - self.noted
        if not missing:
            return
        self.noted = self.dropped
        if self.held and self.held[-1].get("kind") == DROPPED:
            missing += self.held.pop()["count"]
        event = {"format": FORMAT, "kind": DROPPED, "time": now(), "step": 0, "count": missing}
        line = self.line_of(event)
        if line is not None:
            self.held.append(line)

    @property
    def waiting(self) -> int:
        """Return the number of lines that are not written."""
        return len(self.held) + bool(self.rest)

    def write(self) -> None:
        """Write the held events.

        Raises:
            OSError: the disk refused; the rest stays held.
        """
        if self.descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor = os.open(self.path, flags, 0o666)
        while self.rest or self.held:
            if not self.rest:
                self.rest = strict_json.dumps(self.held.popleft()).encode() + b"\n"
            self.rest = self.rest[os.write(self.descriptor, self.rest) :]

    def close(self) -> None:
        """Close the file once it is on disk; raises as `write` does."""
        if self.descriptor is not None:
            descriptor = self.descriptor
            self.descriptor = None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class Writer:
    """The thread that writes events, so that no disk stops a step.

    While the disk refuses, lines wait in memory, up to `MOST_HELD` of each file.
    """

    def __init__(self, journals: Sequence[Journal], close_s: float = CLOSE_S) -> None:
        self.journals = journals
        self.close_s = close_s
        self.warned = False
        self.behind = False
        """True from a wait that was too short until everything is written."""
        self._changed = threading.Condition()
        self._queue: deque[Mapping[str, Any]] = deque()
        self._busy = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def put(self, kind: str, step: int, /, **facts: Any) -> None:
        """Add an event of now; never waits."""
        event = {"format": FORMAT, "kind": kind, "time": now(), "step": step, **facts}
        with self._changed:
            # Only a disk that hangs makes the queue long: the thread holds refused events.
            if len(self._queue) < MOST_HELD:
                self._queue.append(event)
            else:
                for journal in self.journals:
                    journal.dropped += journal.line_of(event) is not None
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait at most `seconds` until all events are written; not during an earlier wait."""
        with self._changed:
            if not self.behind:
                self.behind = not self._changed.wait_for(self._is_idle, seconds)

    def close(self) -> None:
        """End the thread, and report the lines that were lost."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(self.close_s)
        for journal in self.journals:
            lost = journal.dropped + journal.waiting
            if lost:
                warn(f"{journal.path}: {lost} lines were not written")

    def _is_idle(self) -> bool:
        return not self._queue and not self._busy

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._over, self._pause())
                events = list(self._queue)
                self._queue.clear()
                self._busy = True
                over = self._over
            for journal in self.journals:
                for event in events:
                    journal.hold(event)
                journal.note_gap()
                self._write(journal, over=over)
            with self._changed:
                self._busy = any(journal.waiting for journal in self.journals)
                self.behind = self.behind and self._busy
                self._changed.notify_all()
                if over and not self._queue:
                    break
        for journal in self.journals:
            self._try(journal, journal.close)

    def _pause(self) -> float | None:
        return RETRY_S if any(journal.waiting for journal in self.journals) else None

    def _write(self, journal: Journal, *, over: bool) -> None:
        if journal.waiting and (over or time.monotonic() >= journal.retry_at):
            self._try(journal, journal.write)

    def _try(self, journal: Journal, work: Callable[[], None]) -> None:
        try:
            work()
        except (TypeError, ValueError):  # an event that is no JSON, as a plug-in may log it
            journal.dropped += 1
        except OSError as error:
            journal.retry_at = time.monotonic() + RETRY_S
            if not self.warned:
                self.warned = True
                warn(
                    f"{journal.path} cannot be written ({error.strerror or error}); training goes"
                    f" on, and up to {MOST_HELD} lines wait until it can"
                )


def metrics_line(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the line of an event in `metrics.jsonl`; None: it has none."""
    if event["kind"] not in (STEP, EVALUATION):
        return None
    return {"time": event["time"], "step": event["step"], **event["values"]}


def now() -> str:
    """Return the time in UTC, RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def attempts(home: Path) -> list[Path]:
    """Return the files of a run's attempts, the first attempt first."""
    files = (home / FOLDER).glob("*.jsonl")
    return sorted((file for file in files if file.stem.isdigit()), key=lambda file: int(file.stem))


def next_attempt(home: Path) -> Path:
    """Return the file of a new attempt; its folder exists if the disk allows."""
    with suppress(OSError):
        (home / FOLDER).mkdir(exist_ok=True)
    numbers = [int(file.stem) for file in attempts(home)]
    return home / FOLDER / f"{max(numbers, default=0) + 1:04d}.jsonl"
