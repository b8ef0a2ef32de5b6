"""The time of a step in which this rank works itself, and does not wait for other ranks.

On a GPU, events of the device around each collective and each wait give the time in which its
stream waits, so a throttled device shows. On a CPU the same events are readings of a clock, and a
machine with more threads than cores would add the time in which a thread waits for a core; the
system counts that time, and it is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain.devices.base import Device, Event

# Nanoseconds on a core, nanoseconds waiting for one, and time slices, of this thread
SCHEDULED = Path("/proc/thread-self/schedstat")


class OwnTime:
    """The own time of the step that this process is launching."""

    now: OwnTime | None = None
    """The one that is counting."""

    def __init__(self, device: Device) -> None:
        """Begin to count."""
        self.device = device
        self.pauses: list[tuple[Event, Event]] = []
        self.before = _scheduled()
        self.after = self.before
        OwnTime.now = self

    def stop(self) -> None:
        """End the count."""
        self.after = _scheduled()
        OwnTime.now = None

    @classmethod
    def pause(cls) -> Event | None:
        """Stop counting if a step is counted, because a wait for other ranks begins."""
        # A thread that reads or writes files next to the step holds up no step.
        if cls.now is None or type(threading.current_thread()) is threading.Thread:
            return None
        return cls.now.device.event()

    @classmethod
    def resume(cls, begun: Event | None) -> None:
        """Count again after the wait that `begun` began."""
        if begun is not None and cls.now is not None:
            cls.now.pauses.append((begun, cls.now.device.event()))

    def seconds(self, step_s: float) -> float:
        """Return the own time of a step that took `step_s`; the device has finished the step."""
        waited = sum(begin.elapsed_time(end) for begin, end in self.pauses) / 1e3
        if self.device.runs_ahead:
            return step_s - waited
        worked, queued = (end - begin for begin, end in zip(self.before, self.after, strict=True))
        # Some of `queued` is part of `waited` already, so the difference may be too small, and the
        # time on a core is a floor. The difference also has waits for disks and memory.
        return max(worked, step_s - waited - queued)


@dataclass(frozen=True)
class Slow:
    """A rank that was slow in a report."""

    rank: int
    own_s: float
    """Its own time of a step."""
    usual_s: float
    """The median of its stage."""


def slow(own_s: Mapping[int, float], ratio: float) -> list[Slow]:
    """Return the ranks of a stage whose own time exceeds `ratio` times the median.

    Of an even number, the lower middle counts, so that one of two ranks can be slow.
    """
    usual_s = median_low(own_s.values())
    return [Slow(rank, own, usual_s) for rank, own in own_s.items() if own > ratio * usual_s > 0]


def _scheduled() -> tuple[float, float]:
    """Return the seconds that this thread has been on a core, and those that it waited for one."""
    with suppress(OSError, ValueError):
        worked, queued, *_ = SCHEDULED.read_text().split()
        return int(worked) / 1e9, int(queued) / 1e9
    # Where the system does not count it, all time off the core may have been in the queue.
    worked_s = time.thread_time()
    return worked_s, time.perf_counter() - worked_s
