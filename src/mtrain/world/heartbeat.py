"""Progress of this rank, as cheaply as it can be noted: what the watchdog looks at.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Heartbeat:
    """How far this rank's main thread has come.

    Written by that thread alone, read by the watchdog's.
    """

    __slots__ = ("count", "phase", "step", "ticks", "waits")

    def __init__(self) -> None:
        self.count = 0
        """Milestones passed; every rank passes the same ones in the same order."""
        self.ticks = 0
        """Signs of life between milestones, as many as this rank's work has."""
        self.phase = "start"
        """What the last milestone began."""
        self.step = 0
        """The step that was begun last, from 1; 0: none yet."""
        self.waits = 0
        """The number of nested calls in which the main thread waits for other ranks or for the
        device.
        """

    @property
    def place(self) -> str:
        """Step and phase in words."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase


heartbeat = Heartbeat()


def begin_phase(phase: str) -> None:
    """Note that `phase` begins, which it does on every rank."""
    heartbeat.count += 1
    heartbeat.phase = phase


def begin_step(number: int) -> None:
    """Note that a step begins, on every rank."""
    heartbeat.step = number
    begin_phase("data")


def tick() -> None:
    """Note progress within a phase, as a rank makes it that has more to do there than another."""
    heartbeat.ticks += 1


@contextmanager
def waiting() -> Iterator[None]:
    """Note that the main thread waits in this block: for other ranks, or for the device, which may
    wait for them.
    """
    heartbeat.waits += 1
    try:
        yield
    finally:
        heartbeat.waits -= 1
