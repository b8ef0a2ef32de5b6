"""Progress of this rank's main thread, cheap to record, for the watchdog to read.

Importing this module does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Heartbeat:
    """The progress of this rank's main thread.

    Only that thread writes it; the watchdog's threads read it.
    """

    __slots__ = ("count", "phase", "step", "ticks", "waits")

    def __init__(self) -> None:
        self.count = 0
        """Milestones passed; every rank passes the same ones in the same order."""
        self.ticks = 0
        """Signs of life between milestones; a rank with more work gives more."""
        self.phase = "start"
        """The phase that the last milestone began."""
        self.step = 0
        """The current step, from 1; 0 before the first."""
        self.waits = 0
        """The number of nested waits of the main thread for other ranks or its device."""

    @property
    def place(self) -> str:
        """Step and phase in words."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase


heartbeat = Heartbeat()


def begin() -> None:
    """Begin again, for a process that joins another world."""
    Heartbeat.__init__(heartbeat)


def begin_phase(phase: str) -> None:
    """Note that `phase` begins. Every rank begins the same phases in the same order."""
    heartbeat.count += 1
    heartbeat.phase = phase


def begin_step(number: int) -> None:
    """Note that a step begins, on every rank."""
    heartbeat.step = number
    begin_phase("data")


def tick() -> None:
    """Note progress within a phase; ranks with more work in that phase call it more often."""
    heartbeat.ticks += 1


@contextmanager
def waiting() -> Iterator[None]:
    """Note that the main thread waits in this block, for other ranks or for the device."""
    heartbeat.waits += 1
    try:
        yield
    finally:
        heartbeat.waits -= 1


@contextmanager
def noting_waits() -> Iterator[None]:
    """Note every `Work.wait` of the main thread.

    Collectives of torch, the pipeline transfers of megatron-core and our own exchanges all end in
    that method, so one place notes them all, and no reader has to guess a rank's activity from a
    source line.
    """
    from torch.distributed import Work

    real = Work.wait

    def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
        # Another thread may wait for its peers while the main thread computes.
        if threading.current_thread() is not threading.main_thread():
            return real(work, *args, **kwargs)
        with waiting():
            return real(work, *args, **kwargs)

    Work.wait = wait  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Work.wait = real  # type: ignore[method-assign]
