"""Detectors that read times, memory and the load of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp, inf, log
from statistics import median
from typing import Any

from mtrain.train.alerts.detector import Detector, Line, number
from mtrain.train.running_median import RunningMedian
from mtrain.units import bytes_, count

FIRST_STEPS = 3
"""Steps of a process that compile kernels and fill queues: their times are left out."""


class Slow(Detector):
    """Tokens per second below their running median.

    A process compares its own steps only: another one may have other machines. A larger batch has
    no fewer tokens per second; after a change to a smaller one, the comparison begins afresh.
    """

    name = "slow"
    RECENT = 7
    WINDOW = 100
    LEAST = 20
    SPREADS = 4.0

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.usual = RunningMedian(self.WINDOW, self.LEAST)
        self.recent: deque[float] = deque(maxlen=self.RECENT)
        self.seen = 0
        self.batch = 0
        self.in_a_row = 0

    def see(self, line: Line) -> str | None:
        """Compare the median of the last few steps."""
        rate = number(line, "tokens_per_s")
        self.seen += rate is not None
        if rate is None or rate <= 0 or self.seen <= FIRST_STEPS:
            return None
        # Rates of larger batches are no fair reference.
        batch = int(line.get("batch_size", 0))
        if batch < self.batch:
            self.usual.clear()
            self.recent.clear()
        self.batch = batch
        self.recent.append(log(rate))
        middle = self.usual.middle
        bound = middle - max(log(self.factor), self.SPREADS * self.usual.spread)
        # Slow steps stay out of the median, which would otherwise fall with them.
        is_slow = self.usual.is_known and self.recent[-1] < bound
        self.in_a_row = self.in_a_row + 1 if is_slow else 0
        if self.in_a_row >= self.WINDOW:  # the run is slower from now on
            self.usual.clear()
        if self.in_a_row == 0 or not self.usual.is_known:
            self.usual.add(self.recent[-1])
        if len(self.recent) < self.RECENT or not median(self.recent) < bound < inf:
            return ""
        now = exp(median(self.recent))
        usual = exp(middle)
        return (
            f"{count(now)} tokens/s over the last {self.RECENT} steps, and {count(usual)} in the"
            f" median before (log.alert_slowdown={self.factor:g})"
        )


class BelowPlan(Detector):
    """Steps of the whole batch that take longer than planned."""

    name = "below_plan"
    RECENT = 15

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=self.RECENT)
        self.seen = 0

    def see(self, line: Line) -> str | None:
        """Compare the median of the last steps with the plan."""
        took = number(line, "step_s")
        planned = number(line, "planned_step_s")
        self.seen += took is not None
        if took is None or not planned or self.seen <= FIRST_STEPS:
            return None
        self.recent.append(took)
        usual = median(self.recent)
        if len(self.recent) < self.RECENT or usual <= self.factor * planned:
            return ""
        return (
            f"a step takes {usual:.3f} s in the median of {self.RECENT}, and {planned:.3f} s were"
            f" planned (log.alert_slowdown={self.factor:g})"
        )


class DataWait(Detector):
    """Steps that wait for samples."""

    name = "data_wait"
    RECENT = 10
    SHARE = 0.2

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=self.RECENT)
        self.seen = 0

    def see(self, line: Line) -> str | None:
        """Take the median of the last steps."""
        share = number(line, "data_wait_share")
        self.seen += share is not None
        if share is None or self.seen <= FIRST_STEPS:
            return None
        self.recent.append(share)
        usual = median(self.recent)
        if len(self.recent) < self.RECENT or usual <= self.SHARE:
            return ""
        return f"steps wait for samples for {usual:.0%} of their time (median of {self.RECENT})"


class FullMemory(Detector):
    """Memory of a device, or of a host, that is nearly used up.

    It reads `peak_bytes` of steps, those of rank 0, and `ranks` of memory samples.
    """

    name = "memory"

    def __init__(self, share: float, device_bytes: float | None) -> None:
        """Compare with `share` of a device's memory; None: it is unknown, or the host's."""
        self.share = share
        self.device_bytes = device_bytes
        self.sampled = ""
        """The condition in the last sample, which lasts until the next one."""

    def see(self, line: Line) -> str | None:
        """Compare the fullest device, and the fullest host."""
        ranks = line.get("ranks")
        if ranks is not None:
            self.sampled = self._of_devices(ranks) or self._of_hosts(ranks)
            return self.sampled
        if number(line, "peak_bytes") is None:
            return None
        return self.sampled or self._of_devices([line])

    def _of_devices(self, ranks: Sequence[Line]) -> str:
        peaks = [number(rank, "peak_bytes") or 0.0 for rank in ranks]
        most = max(peaks, default=0.0)
        if self.device_bytes is None or most <= self.share * self.device_bytes:
            return ""
        return (
            f"tensors of rank {peaks.index(most)} took {bytes_(int(most))} of the device's"
            f" {bytes_(int(self.device_bytes))} (log.alert_memory={self.share:g})"
        )

    def _of_hosts(self, ranks: Sequence[Line]) -> str:
        for place, rank in enumerate(ranks):
            free = number(rank, "host_free_bytes")
            whole = number(rank, "host_bytes")
            if free is not None and whole and free < (1 - self.share) * whole:
                return (
                    f"the machine of rank {place} has {bytes_(int(free))} of"
                    f" {bytes_(int(whole))} left (log.alert_memory={self.share:g})"
                )
        return ""


class Experts(Detector):
    """Experts that get no tokens, or ranks that get far more than others.

    It reads `expert_load`, tokens of each expert by router, and `rank_load`, tokens of each
    expert-parallel rank, which steps that `log.statistics` describes have.
    """

    RECENT = 5
    """Lines in a row: one batch may leave an expert out."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def see(self, line: Line) -> str | None:
        """Compare the loads of a line."""
        text = self._found(line)
        if text is None:
            return None
        self.in_a_row = self.in_a_row + 1 if text else 0
        return text if self.in_a_row >= self.RECENT else ""

    def _found(self, line: Line) -> str | None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the lines in a row."""
        return {"row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the lines of the resumed run."""
        self.in_a_row = state["row"]


class DeadExpert(Experts):
    """An expert that gets less than a hundredth of its share of the tokens."""

    name = "dead_expert"
    SHARE = 0.01

    def _found(self, line: Line) -> str | None:
        loads: Mapping[str, Sequence[float]] | None = line.get("expert_load")
        if loads is None:
            return None
        dead = []
        for layer, load in loads.items():
            least = self.SHARE * sum(load) / len(load)
            dead += [f"{place} of {layer}" for place, got in enumerate(load) if got < least]
        more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
        return f"experts get no tokens: {', '.join(dead[:3])}{more}" if dead else ""


class OverloadedRank(Experts):
    """An expert-parallel rank that gets twice as many tokens as the mean: others wait for it."""

    name = "overloaded_rank"
    FACTOR = 2.0

    def _found(self, line: Line) -> str | None:
        load: Sequence[float] | None = line.get("rank_load")
        if load is None:
            return None
        mean = sum(load) / len(load)
        most = max(load)
        if len(load) < 2 or most <= self.FACTOR * mean:
            return ""
        return (
            f"the experts of expert-parallel rank {list(load).index(most)} get"
            f" {most / mean:.1f} times the mean of all ranks"
        )
