"""The plan next to what a run measures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import program
from mtrain.errors import MtrainError
from mtrain.plan.compare import (
    ALLOCATED,
    FIRST_STEPS,
    Row,
    counts_memory,
    first_full,
    peaks_in,
    planned,
    rows,
    saved_in,
)
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.readings import may_pad
from mtrain.train.loop.result import StepResult
from mtrain.units import bytes_, count, duration

AFTER = 10
"""Steps of this process after which the plan is compared with them, once."""
TIMES = ("step", "forward_backward", "optimizer")
"""Parts of the time of a step that are planned and measured."""


class Planned(Hook):
    """A note of the plan before the first step, and one of each part that turns out otherwise.

    It adds planned times and memory to the metrics of each step.

    Parts of the time, and the memory of the first rank, are compared after `AFTER` steps, or at the
    end where there are fewer; the memory of all stages and the checkpoint at the end.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self.progress = progress
        self.plan: dict[str, Any] | None = None
        self.lines: list[dict[str, float]] = []
        self.last = 0
        """The step of the last of them."""
        self.said: set[str] = set()

    def start(self, context: TrainContext) -> None:
        """Make the plan, on rank 0."""
        if context.world.is_rank0:
            self.plan = planned(context.run)
            context.measures.append(self.measure)
        if self.plan is not None and (words := _planned_words(context, self.plan)):
            self.progress.note(f"planned: {words}")

    def measure(self, context: TrainContext, result: StepResult) -> dict[str, float]:
        """Return the planned times of a step, and the measured and planned peaks of this rank.

        Empty on other ranks, and for a step of a smaller batch, which was not planned.
        """
        if self.plan is None or result.batch_size != context.run.trainer.batch:
            return {}
        times = {f"planned_{name}_s": self.plan[f"{name}_s"] for name in TIMES}
        record = {key: round(value, 6) for key, value in times.items() if value is not None}
        if counts_memory(context.run):
            peak = context.world.device.memory_stats()["peak_bytes"]
            record |= {
                "peak_bytes": peak,
                "planned_peak_bytes": self.plan["memory_by_stage"][ALLOCATED][0],
            }
        return record

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Compare after `AFTER` steps of the whole batch."""
        if self.plan is None or len(self.lines) >= AFTER or result.step < first_full(context.run):
            return
        if result.step in context.profiled:
            return
        self.lines.append({f"{name}_s": value for name, value in result.seconds.items()})
        self.last = result.step
        if len(self.lines) == AFTER:
            memory = context.world.device.memory_stats
            peaks = {ALLOCATED: [memory()[ALLOCATED]]} if counts_memory(context.run) else {}
            self._say(rows(context.run, self.plan, self.lines, peaks, None))

    def finish(self, context: TrainContext) -> None:
        """Compare the memory of all stages and the checkpoint, which only the end shows."""
        if self.plan is not None:
            # The first steps compile kernels and are left out: a shorter run has no times to
            # compare.
            lines = self.lines if FIRST_STEPS < len(self.lines) < AFTER else []
            # `memory.json` was written by a hook that may have failed.
            try:
                peaks = peaks_in(self.folder)
            except MtrainError:  # the run is done: a damaged file of its folder must not fail it
                peaks = {}
            self._say(rows(context.run, self.plan, lines, peaks, saved_in(self.folder)))

    def _say(self, compared: Iterable[Row]) -> None:
        off = [row for row in compared if row.beyond and row.part not in self.said]
        if not off:
            return
        self.said |= {row.part for row in off}
        timed = any(row.kind == "time" for row in off)
        first = self.last - len(self.lines) + FIRST_STEPS + 1
        where = f"steps {first} to {self.last} are" if timed else "this run is"
        then = f"; all parts: {program()} plan --compare {self.folder}"
        if timed:
            then += f"; with the rates of this machine: plan --calibrate {self.folder} out=FILE"
        self.progress.note(f"{where} not what was planned: {'; '.join(map(_said, off))}{then}")


def _planned_words(context: TrainContext, plan: dict[str, Any]) -> str:
    """Return the planned time of a step, and the planned memory of a device, as words."""
    run = context.run
    words = []
    if plan["step_s"] is not None:
        rate = count(run.trainer.batch * run.data.length / plan["step_s"])
        full = " where samples are full" if may_pad(run) else ""
        words.append(f"a step of {duration(plan['step_s'])}, {rate} tokens/s{full}")
    if counts_memory(run):
        peaks = plan["peak_bytes_by_stage"]
        # The fullest stage decides whether the run fits.
        stage = max(range(len(peaks)), key=peaks.__getitem__)
        words.append(f"{bytes_(peaks[stage])} on a device of pipeline stage {stage}")
    return "; ".join(words)


def _said(row: Row) -> str:
    say = duration if row.kind == "time" else bytes_
    return (
        f"{row.part} {say(row.measured or 0)}, planned {say(row.planned or 0)}, {row.off or 0:+.0%}"
    )
