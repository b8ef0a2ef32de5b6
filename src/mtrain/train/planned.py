"""The plan beside what is measured while a run goes on."""

from __future__ import annotations

from typing import Any

from mtrain.plan.compare import FIRST_STEPS, Row, counts_memory, first_full, planned, rows
from mtrain.train.progress import Progress
from mtrain.train.step import Parts, StepResult
from mtrain.train.trainer import Hook
from mtrain.units import bytes_, duration

AFTER = 10
"""Steps of this process after which the plan is compared with them, once."""


class Planned(Hook):
    """Says once which part of a run is not what was planned (its `plan.json`), and how far off it is."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.plan: dict[str, Any] | None = None
        self.lines: list[dict[str, float]] = []

    def start(self, parts: Parts) -> None:
        """Make the plan, on rank 0."""
        if parts.world.is_rank0:
            self.plan = planned(parts.run)

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """Compare after `AFTER` steps of the whole batch."""
        if self.plan is None or len(self.lines) >= AFTER:
            return
        if result.step < first_full(parts.run):
            return
        self.lines.append({f"{name}_s": value for name, value in result.seconds.items()})
        if len(self.lines) < AFTER:
            return
        run, stats = parts.run, parts.world.device.memory_stats
        peaks = [stats()["peak_bytes"]] if counts_memory(run) else []
        off = [row for row in rows(run, self.plan, self.lines, peaks, None) if row.beyond]
        if off:
            where = f"steps {result.step - AFTER + FIRST_STEPS + 1} to {result.step}"
            self.progress.note(f"{where} are not what was planned: {'; '.join(map(_said, off))} (plan --compare)")


def _said(row: Row) -> str:
    say = duration if row.kind == "time" else bytes_
    return f"{row.part} {say(row.measured or 0)}, planned {say(row.planned or 0)}, {row.off or 0:+.0%}"
