"""Numbers and times of steps: added over all ranks, divided, and brought to the host without
holding up the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mtrain.devices.base import Device, Event
from mtrain.train.objectives import SUM, Metric
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World

AHEAD = 1
"""Steps that the device may be behind: while it works on one, the host gives it the next."""
STEP_METRICS = ("stops", "due", "read", "flops", "full_flops")
"""Numbers that the loop itself adds up: ranks that want to stop, what the clock of rank 0 requests
(`mtrain.train.loop.interruptions`), tokens without padding, and their model FLOPs, with half and
with all of attention.
"""


class MetricTable:
    """The metrics of a step, in the order in which all ranks add them up."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        """Take the metrics that the objective declares."""
        self.declared = tuple(declared)
        self.metrics = (*declared, *(Metric(name) for name in STEP_METRICS))
        self._places = {metric.name: place for place, metric in enumerate(self.metrics)}
        divisors = {metric.reduce for metric in declared}
        self.extra = tuple(
            metric.name
            for metric in declared
            if metric.name not in divisors and metric.name != "loss"
        )
        """Metrics of the objective that are logged next to loss and tokens."""

    def __len__(self) -> int:
        return len(self.metrics)

    def place(self, name: str) -> int:
        """Return the place of a metric in a row."""
        return self._places[name]

    def divided(self, row: Sequence[float]) -> dict[str, float]:
        """Return the metrics by name from their totals over all ranks."""
        totals = {metric.name: row[place] for place, metric in enumerate(self.metrics)}
        divided = {}
        for metric in self.metrics:
            total = totals[metric.name]
            # A step may have no prediction that counts: its mean is 0, not an error.
            divisor = 1.0 if metric.reduce == SUM else max(1.0, totals[metric.reduce])
            divided[metric.name] = total / divisor
        return divided


def packed(declared: Sequence[Metric], metrics: Iterable[Metric]) -> torch.Tensor:
    """Return the values of a micro-batch's metrics as one tensor, in the order declared.

    Raises:
        KeyError: the objective declares a metric that it did not report.
    """
    values = {metric.name: metric.value for metric in metrics}
    return torch.stack([torch.as_tensor(values[metric.name]) for metric in declared])


def summed_report(
    world: World,
    table: MetricTable,
    reports: Sequence[torch.Tensor],
    own: Mapping[str, float],
) -> torch.Tensor:
    """Add up a step over all ranks, in one all-reduce.

    Args:
        world: this rank and all others.
        table: the metrics.
        reports: `packed` values of each micro-batch that had its loss here.
        own: numbers of `STEP_METRICS` that this rank adds; others are 0.

    Returns:
        fp64 [metrics] on the device.
    """
    values = torch.zeros(len(table), dtype=torch.float64, device=world.torch_device)
    # Tensor-parallel ranks report the same losses: one of them counts.
    if reports and world.coords["tp"] == 0:
        sums = torch.stack([report.double() for report in reports]).sum(0)
        values[: len(sums)] = sums
    for name, number in own.items():
        values[table.place(name)] = float(number)
    begin_phase("report")
    dist.all_reduce(values)
    return values


def reduce_report(
    world: World, table: MetricTable, reports: Sequence[torch.Tensor], stop: bool
) -> dict[str, float]:
    """Return the metrics of `summed_report` by name; waits for the device."""
    return table.divided(summed_report(world, table, reports, {"stops": stop}).tolist())


class Reading:
    """A row of numbers on its way to the host."""

    def __init__(self, row: torch.Tensor, there: Event | None) -> None:
        self._row = row
        self._there = there
        self._found: list[float] | None = None

    def read(self) -> list[float]:
        """Return the numbers; waits until the device has computed them, and for nothing after
        that.
        """
        if self._found is None:
            if self._there is not None:
                begin_phase("waiting for the device")
                with waiting():
                    self._there.synchronize()
            self._found = self._row.tolist()
        return self._found


class Board:
    """Rows of pinned host memory that numbers are copied to, allocated once and used in turns."""

    def __init__(self, device: Device, width: int) -> None:
        """Make rows of at most `width` numbers of 8 bytes each."""
        self.device = device
        self.width = width
        self._rows: list[torch.Tensor] = []
        self._last: list[Reading | None] = [None] * (AHEAD + 1)
        self._turn = 0

    def copy(self, values: torch.Tensor) -> Reading:
        """Begin to copy numbers of the device (fp64, at most `width`) to the host."""
        if not self.device.runs_ahead:
            return Reading(values, None)
        if not self._rows:
            count = len(self._last)
            memory = self.device.pinned(8 * self.width * count)
            self._rows = list(memory.view(torch.float64).view(count, self.width))
        self._turn = (self._turn + 1) % len(self._last)
        if (before := self._last[self._turn]) is not None:
            # The row is about to be overwritten; whoever holds the reading keeps its numbers.
            before.read()
        row = self._rows[self._turn][: len(values)]
        row.copy_(values, non_blocking=True)
        reading = self._last[self._turn] = Reading(row, self.device.event())
        return reading


class Clock:
    """Times of a step by phase, measured by events of the device; on a CPU by the wall clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin = device.event()
        self._phases: dict[str, tuple[Event, Event]] = {}
        self._end: Event | None = None
        self.waited_s = 0.0
        """Seconds in which the host waited for samples."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the work that is given to the device inside."""
        begin = self._device.event()
        yield
        self._phases[name] = begin, self._device.event()

    def stop(self) -> None:
        """Note the end of the step."""
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
    """Set what waiting for the device is inside, by `trainer.sync_debug`: allowed (`none`), a
    warning or an error.
    """
    if mode == "none":
        yield
        return
    device.set_sync_debug(mode)
    try:
        yield
    finally:
        device.set_sync_debug("default")
