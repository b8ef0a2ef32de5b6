"""The own time of ranks, compared every so many steps: a rank that holds up the others is named."""

from __future__ import annotations

import json
import platform
from statistics import median
from typing import Any

from mtrain import strict_json
from mtrain.config.schema.resilience import ResilienceConfig
from mtrain.errors import Preempted, warn
from mtrain.events.log import OWN_TIME, STRAGGLER
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
from mtrain.units import number_of
from mtrain.world.own_time import slow


class Stragglers(Hook):
    """A comparison of the own time of ranks every `resilience.straggler_interval` steps.

    Each rank writes the median of its steps to the store and waits for nobody. Rank 0 reads a
    report when the next one is due: by then every rank has written it, because all ranks meet in
    the steps between.
    """

    def __init__(self, resilience: ResilienceConfig, metrics: Metrics) -> None:
        assert resilience.straggler_interval is not None
        self.keys = resilience
        self.metrics = metrics
        self.interval = resilience.straggler_interval
        self.own_s: list[float] = []
        """The own time of each step since the last report."""
        self.last = 0
        """The step of the last report; 0: there was none."""
        self.in_a_row: dict[int, int] = {}
        """Reports in a row, by rank that was slow in each of them."""

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether a report is due."""
        return step % self.interval == 0

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Write a report, and on rank 0 read the one before."""
        if "own" in result.seconds and result.step not in context.profiled:
            self.own_s.append(result.seconds["own"])
        if result.step % self.interval or not self.own_s:
            return
        store = context.world.store
        rank = context.world.rank
        ranks = range(context.world.size)
        if rank == 0 and self.last:
            texts = store.multi_get([_key(self.last, self.interval, rank) for rank in ranks])
            reports = [json.loads(text) for text in texts]
            # A store that outlived an earlier start of the ranks may have a report of that one.
            if {report["step"] for report in reports} == {self.last}:
                self._compare(context, reports)
        report = {
            "step": result.step,
            "own_s": median(self.own_s),
            "machine": platform.node(),
            "device": str(context.world.torch_device),
        }
        store.set(_key(result.step, self.interval, rank), strict_json.dumps(report))
        self.last = result.step
        self.own_s.clear()

    def _compare(self, context: TrainContext, reports: list[dict[str, Any]]) -> None:
        own_s = [report["own_s"] for report in reports]
        self.metrics.note(OWN_TIME, reports[0]["step"], own_s=own_s)
        grid = context.world.grid
        stages: dict[int, dict[int, float]] = {}
        for rank, report in enumerate(reports):
            stages.setdefault(grid.coords(rank)["pp"], {})[rank] = report["own_s"]
        found = [one for own in stages.values() for one in slow(own, self.keys.straggler_ratio)]
        self.in_a_row = {one.rank: self.in_a_row.get(one.rank, 0) + 1 for one in found}
        named = [one for one in found if self.in_a_row[one.rank] == self.keys.straggler_reports]
        restarts = self.keys.on_straggler == "restart"
        for one in named:
            report = reports[one.rank]
            self.metrics.note(
                STRAGGLER,
                report["step"],
                rank=one.rank,
                machine=report["machine"],
                device=report["device"],
                own_s=one.own_s,
                usual_s=one.usual_s,
            )
            then = f"; the run saves and ends with exit code {Preempted.exit_code}"
            warn(
                f"step {report['step']}: rank {one.rank} on {report['machine']}"
                f" ({report['device']}) is slow: its own work took {1e3 * one.own_s:.1f} ms a step,"
                f" {one.own_s / one.usual_s:.1f} x the median of its pipeline stage"
                f" ({1e3 * one.usual_s:.1f} ms), in"
                f" {number_of(self.keys.straggler_reports, 'report')} in a row"
                f" (resilience.straggler_ratio={self.keys.straggler_ratio:g})"
                f"{then if restarts else ''}"
            )
        if named and restarts:
            # All ranks learn of it with the next step, as of a signal that one of them got.
            context.stop.requested = True


def _key(step: int, interval: int, rank: int) -> str:
    """Return where a report is: rank 0 reads one while other ranks may write the next."""
    return f"stragglers/{step // interval % 2}/{rank}"
