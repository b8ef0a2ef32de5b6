"""Numbers and times of steps, on their way from the device to the host without holding it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from mtrain.devices.base import Device, Event
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World

AHEAD = 1
"""Steps that the device may be behind: while it works on one, the host gives it the next."""
ROW = 12
"""Numbers of a row, each in 8 bytes."""


REPORT = 10
"""Numbers of `summed_report`.

Where the host did not wait for the gradient's norm, the norm comes behind them.
"""


class Means(NamedTuple):
    """Means of the reports of all ranks."""

    loss: float
    tokens: int
    stops: int
    """Ranks that want to stop."""
    z_loss: float
    token_accuracy: float
    due: int
    """What the clock of rank 0 asks for; see `mtrain.train.loop.interruptions`."""
    read: int
    """Tokens that are there, predicted from or not: without padding."""
    flops: float
    """Model FLOPs of them, with half of attention."""
    full_flops: float
    """The same with all of attention."""

    @classmethod
    def of(cls, row: Sequence[float]) -> Means:
        """From the numbers of `summed_report`."""
        total, count, tokens, z_loss, hits, stops, due, read, flops, full_flops = row[:REPORT]
        count = max(1.0, count)
        found = total / count, int(tokens), int(stops), z_loss / count, hits / max(1.0, tokens)
        return cls(*found, int(due), int(read), flops, full_flops)


def summed_report(
    world: World,
    reports: Sequence[torch.Tensor],
    stop: bool,
    due: int = 0,
    work: Sequence[float] = (),
) -> torch.Tensor:
    """Return the reports of `sum_loss`, how many ranks want to stop, and the `work` of this rank:
    the tokens that it alone counts, and their model FLOPs with half and with all of attention.
    Added up over all ranks in one all-reduce.

    `due` is what the clock of rank 0 asks for, and 0 on all other ranks.

    Returns:
        fp64 [10] on the device: loss, count, predictions that count, z-losses, hits, ranks that
        want to stop, `due`, work.
    """
    values = torch.zeros(REPORT, dtype=torch.float64, device=world.torch_device)
    if reports and world.coords["tp"] == 0:
        found = torch.stack([r.double() for r in reports]).sum(0)
        values[: len(found)] = found
    for place, number in enumerate((float(stop), float(due), *work), 5):
        values[place] = number
    begin_phase("report")
    dist.all_reduce(values)
    return values


def reduce_report(world: World, reports: Sequence[torch.Tensor], stop: bool) -> Means:
    """Return the means of `summed_report`; waits for the device."""
    return Means.of(summed_report(world, reports, stop).tolist())


class Reading:
    """A row of numbers on its way to the host."""

    def __init__(self, row: torch.Tensor, there: Event | None) -> None:
        self._row = row
        self._there = there
        self._found: list[float] | None = None

    def read(self) -> list[float]:
        """Return the numbers; waits until the device has come to where they are known, and for
        nothing behind it.
        """
        if self._found is None:
            if self._there is not None:
                begin_phase("waiting for the device")
                with waiting():
                    self._there.synchronize()
            self._found = self._row.tolist()
        return self._found


class Board:
    """Rows of host memory that numbers are copied to, allocated once and used in turns."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._rows: list[torch.Tensor] = []
        self._last: list[Reading | None] = [None] * (AHEAD + 1)
        self._turn = 0

    def copy(self, values: torch.Tensor) -> Reading:
        """Begin to bring numbers of the device (fp64, at most `ROW`) to the host."""
        if not self.device.runs_ahead:
            return Reading(values, None)
        if not self._rows:
            count = len(self._last)
            self._rows = list(
                self.device.pinned(8 * ROW * count).view(torch.float64).view(count, ROW)
            )
        self._turn = (self._turn + 1) % len(self._last)
        if (before := self._last[self._turn]) is not None:
            before.read()  # which was written to this row, and is kept by whoever wants it
        row = self._rows[self._turn][: len(values)]
        row.copy_(values, non_blocking=True)
        reading = self._last[self._turn] = Reading(row, self.device.event())
        return reading


class Clock:
    """Times of a step by phase, between moments of the device; on a CPU, by the clock
    on the wall.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin = device.event()
        self._phases: dict[str, tuple[Event, Event]] = {}
        self._end: Event | None = None
        self.waited_s = 0.0
        """Seconds in which the host waited for samples."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is given to the device inside."""
        begin = self._device.event()
        yield
        self._phases[name] = begin, self._device.event()

    def stop(self) -> None:
        """The step ends here."""
        self._end = self._device.event()

    def seconds(self) -> dict[str, float]:
        """Return the phases, `data_wait`, and all time from the first moment to the last as `step`.

        The device is past all of them.
        """
        assert self._end is not None
        phases = {
            name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in self._phases.items()
        }
        return {
            **phases,
            "data_wait": self.waited_s,
            "step": self._begin.elapsed_time(self._end) / 1e3,
        }


@contextmanager
def sync_checks(device: Device, mode: str) -> Iterator[None]:
    """Inside, waiting for the device is what `trainer.sync_debug` says: allowed (`none`), warned
    of, or an error.
    """
    if mode == "none":
        yield
        return
    device.set_sync_debug(mode)
    try:
        yield
    finally:
        device.set_sync_debug("default")
