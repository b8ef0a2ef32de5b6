"""Numbers and times of steps: counted in micro-batches, added over all ranks, divided, and brought
to the host without holding up the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.config.resolve.defaults import CHATS
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import FURTHER
from mtrain.devices.base import Device, Event
from mtrain.plan.count import flops_of_token
from mtrain.train.objectives import MAX, SUM, Metric
from mtrain.world.heartbeat import begin_phase, waiting
from mtrain.world.init import World
from mtrain.world.labels import STEP, Labels, labelled
from mtrain.world.own_time import OwnTime

AHEAD = 1
"""Steps that the device may be behind: while it works on one, the host gives it the next."""
STEP_METRICS = ("stops", "due", "read", "flops", "full_flops", "routes", "routes_differ")
"""Numbers that the loop itself adds up: ranks that want to stop, what the clock of rank 0 requests
(`mtrain.train.loop.interruptions`), tokens without padding, and their model FLOPs, with half and
with all of attention; experts that replaced those of routers, and how many of them differ.
"""


class MetricTable:
    """The metrics of a step, in the order in which all ranks add them up."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        """Take the metrics that the objective declares."""
        self.declared = tuple(declared)
        self.metrics = (*declared, *(Metric(name) for name in STEP_METRICS))
        self._places = {metric.name: place for place, metric in enumerate(self.metrics)}
        divisors = {metric.reduce for metric in declared}
        self.largest = [self._places[m.name] for m in declared if m.reduce == MAX]
        """Places of metrics that are not added up, but whose largest value is reported."""
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
            whole = metric.reduce in (SUM, MAX)
            divisor = 1.0 if whole else max(1.0, totals[metric.reduce])
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
    own: Mapping[str, float | torch.Tensor],
) -> torch.Tensor:
    """Add up a step over all ranks, in one all-reduce, and in a second one metrics of maxima.

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
        each = torch.stack([report.double() for report in reports])
        sums = each.sum(0)
        sums[table.largest] = each[:, table.largest].max(0).values
        values[: len(sums)] = sums
    for name, number in own.items():
        values[table.place(name)] = number
    begin_phase("report")
    largest = values[table.largest]
    dist.all_reduce(values)
    if table.largest:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        values[table.largest] = largest
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
        reading = Reading(row, self.device.event())
        self._last[self._turn] = reading
        return reading


class Clock:
    """Times of a step by phase, measured by events of the device; on a CPU by the wall clock."""

    def __init__(self, device: Device, *, own: bool = False) -> None:
        """Begin a step; `own`: also count the time in which this rank works itself."""
        self._device = device
        self._own = OwnTime(device) if own else None
        self._label = None if Labels.now is None else Labels.now.opened(STEP)
        self._begin = device.event()
        self._phases: dict[str, tuple[Event, Event]] = {}
        self._end: Event | None = None
        self.waited_s = 0.0
        """Seconds in which the host waited for samples."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the work that is given to the device inside."""
        begin = self._device.event()
        with labelled(name):
            yield
        self._phases[name] = begin, self._device.event()

    def stop(self) -> None:
        """Note the end of the step."""
        self._end = self._device.event()
        if self._label is not None:
            self._label.__exit__(None, None, None)
        if self._own is not None:
            self._own.stop()

    def seconds(self) -> dict[str, float]:
        """Return the phases, `data_wait`, all time from the first moment to the last as `step`, and
        if it was counted `own`.

        The device is past all of them.
        """
        assert self._end is not None
        phases = {
            name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in self._phases.items()
        }
        step_s = self._begin.elapsed_time(self._end) / 1e3
        own = {} if self._own is None else {"own": self._own.seconds(step_s)}
        return {**phases, "data_wait": self.waited_s, "step": step_s, **own}


@contextmanager
def sync_checks(device: Device, mode: str) -> Iterator[None]:
    """Make waits for the device inside allowed (`none`), a warning or an error, by
    `trainer.sync_debug`.
    """
    if mode == "none":
        yield
        return
    device.set_sync_debug(mode)
    try:
        yield
    finally:
        device.set_sync_debug("default")


TALLY = "tally"
"""Key of a micro-batch on the host: its `Tally`, which context parallelism does not split."""


def may_pad(run: RunConfig) -> bool:
    """Return whether samples may have positions that hold no token."""
    d = run.data
    return (
        d.kind in (*CHATS, "image_text")
        or run.objective.pairs
        or d.whole_documents
        or (d.packed and (d.packed_multiple or 1) > 1)
    )


@dataclass(frozen=True)
class Tally:
    """The counts of a micro-batch before context parallelism splits it."""

    losses: float
    """Divisor of the sum of losses."""
    further: tuple[float, ...]
    """Divisors for each token that is predicted after the next one."""
    rows: int
    """Samples, or rows of packed ones."""
    tokens: np.ndarray | None
    """Tokens of each document, or of each row, int64; None: every row is a whole sample."""

    def lengths(self, length: int) -> np.ndarray:
        """Return tokens of each document, or of each row, where a whole sample has `length`; int64,
        none is 0.
        """
        return np.full(self.rows, length, np.int64) if self.tokens is None else self.tokens


def tally_of(batch: Mapping[str, Any], bounds: Sequence[int] | None) -> Tally:
    """Return the counts of a micro-batch whose packed documents begin at `bounds`; None: it is not
    packed.
    """
    counts = batch.get("loss_counts", batch["loss_mask"])
    # no depths without multi-token prediction: an array without columns has no sums
    further = batch[FURTHER].flatten(0, 1).numpy() if FURTHER in batch else np.zeros((1, 0))
    depths = further.astype(np.float64).sum(axis=0).round()
    losses = counts.numpy().astype(np.float64).sum()
    return Tally(
        float(losses), tuple(depths.tolist()), len(batch["tokens"]), _lengths(batch, bounds)
    )


def _lengths(batch: Mapping[str, Any], bounds: Sequence[int] | None) -> np.ndarray | None:
    padding = batch.get("padding")
    there = None if padding is None else ~padding.numpy()
    if bounds is not None:
        # One pass over the tokens: the prefix sum at a document's bounds gives its tokens.
        flat = np.ones(bounds[-1], np.int64) if there is None else there.reshape(-1)
        before = np.concatenate([[0], flat.cumsum()])
        tokens = before[bounds[1:]] - before[bounds[:-1]]
    elif there is not None:
        tokens = there.sum(axis=1)
    else:
        return None
    # A document of padding only has no tokens, and no FLOPs.
    return np.asarray(tokens[tokens > 0], np.int64)


class Flops:
    """Model FLOPs of documents, each as long as it is."""

    def __init__(self, run: RunConfig) -> None:
        self._length = run.data.length
        self._of_token = cache(lambda length, causal: flops_of_token(run, length, causal=causal))

    def of(self, tallies: Iterable[Tally]) -> tuple[float, float, float]:
        """Return tokens of all documents, and the model FLOPs of their forward and backward, with
        half of attention and with all of it.
        """
        lengths = np.concatenate(
            [np.zeros(0, np.int64), *(tally.lengths(self._length) for tally in tallies)]
        )
        # FLOPs depend on the length only, and a step has few different lengths.
        sizes, many = np.unique(lengths, return_counts=True)
        tokens = sizes * many
        causal, full = (
            float(
                sum(
                    count * self._of_token(size, half)
                    for size, count in zip(sizes.tolist(), tokens, strict=True)
                )
            )
            for half in (True, False)
        )
        return float(tokens.sum()), causal, full
