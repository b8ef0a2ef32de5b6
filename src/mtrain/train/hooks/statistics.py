"""Statistics of whole tensors every `log.statistics.interval` steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.events.log import STATISTICS
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.readings import Board, Reading
from mtrain.train.loop.result import StepResult
from mtrain.train.statistics.activations import ACTIVATIONS, ActivationStatistics
from mtrain.train.statistics.attention import ATTENTION, AttentionStatistics
from mtrain.train.statistics.experts import EXPERTS, ExpertStatistics
from mtrain.train.statistics.losses import LOSSES, LossStatistics
from mtrain.train.statistics.part import Part
from mtrain.train.statistics.table import COLUMNS, Rows, Table
from mtrain.train.statistics.weights import GRADIENTS, UPDATES, WEIGHTS, WeightStatistics
from mtrain.world.heartbeat import begin_phase

RATIO = "ratio"
"""The column of updates with their norm over that of the weights."""
DIGITS = 8


class Statistics(Hook):
    """Events of `log.statistics`.

    The device computes them within the step, and the host reads them with the step's own numbers.
    """

    collective = True

    def __init__(
        self,
        run: RunConfig,
        metrics: Metrics,
        see: Callable[[int, Mapping[str, Any]], None] = lambda step, line: None,
        special: Sequence[int] = (),
    ) -> None:
        """Give events to `metrics` and, on rank 0, the loads of experts to `see`; the losses of
        tokens of the ids `special` have a row of their own.
        """
        self.config = run.log.statistics
        self.metrics = metrics
        self.see = see
        self.special = special
        self.waiting: deque[tuple[int, float, Reading]] = deque()

    def start(self, context: TrainContext) -> None:
        """Agree with the other ranks on the rows."""
        own = self.config
        self.weights = WeightStatistics(context, own.modules, own.described)
        self.activations: ActivationStatistics | None = None
        rows = self.weights.rows()
        if ACTIVATIONS in own.described:
            self.activations = ActivationStatistics(context, own.modules)
            rows += self.activations.rows()
        self.table = Table(rows, context.world.torch_device)
        self.parts: list[Part] = []
        if LOSSES in own.described:
            self.parts.append(LossStatistics(context, self.special))
        if ATTENTION in own.described:
            self.parts.append(AttentionStatistics(context, own.modules))
        if EXPERTS in own.described and context.run.model.moe is not None:
            self.parts.append(ExpertStatistics(context, own.modules))
        more = (part.sums.numel() + part.maxima.numel() for part in self.parts)
        self.board = Board(context.world.device, self.table.width + sum(more))

    def due(self, step: int) -> bool:
        """Return whether a step is described."""
        return self.config.interval is not None and step % self.config.interval == 0

    def before_step(self, context: TrainContext) -> None:
        """Begin to add what the forwards compute."""
        if self.due(context.state.step + 1):
            self.table.clear()
            if self.activations is not None:
                self.activations.watch(self.table)
            for part in self.parts:
                part.watch()

    def before_retry(self, context: TrainContext) -> None:
        """Begin anew: only the last forwards of a step count."""
        if self.due(context.state.step + 1):
            self._leave()
            self.before_step(context)

    def _leave(self) -> None:
        if self.activations is not None:
            self.activations.leave()
        for part in self.parts:
            part.leave()

    def before_update(self, context: TrainContext) -> None:
        """Add weights and gradients, before those are clipped."""
        if self.due(context.state.step + 1):
            begin_phase("statistics")
            self._leave()
            scale = loss_scale(context.state.optimizer)
            self.scale = 1.0 if scale is None else scale[0]
            self.weights.before_update(self.table)

    def after_update(self, context: TrainContext) -> None:
        """Add updates and moments, and add up the parts of all ranks."""
        step = context.state.step + 1
        if self.due(step):
            begin_phase("statistics")
            self.weights.after_update(self.table)
            values = self.table.reduced(self.parts)
            if context.world.is_rank0:
                self.waiting.append((step, self.scale, self.board.copy(values)))

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Write the events of steps that the device has finished."""
        while self.waiting and self.waiting[0][0] <= result.step:
            step, scale, reading = self.waiting.popleft()
            numbers = reading.read()
            found = self.table.read(numbers)
            for kind, rows in _finished(found, scale).items():
                columns = (*COLUMNS, RATIO) if kind == UPDATES and WEIGHTS in found else COLUMNS
                self.metrics.note(STATISTICS, step, of=kind, columns=columns, rows=rows)
            at = self.table.width
            for part in self.parts:
                middle = at + part.sums.numel()
                end = middle + part.maxima.numel()
                for facts in part.events(numbers[at:middle], numbers[middle:end]):
                    self.metrics.note(STATISTICS, step, **_rounded(facts))
                    self._see(step, facts)
                at = end

    def _see(self, step: int, facts: Mapping[str, Any]) -> None:
        """Tell the loads of experts to whoever raises alerts."""
        if "loads" in facts:
            ranks = zip(*facts["rank_loads"].values(), strict=True)
            self.see(step, {"expert_load": facts["loads"], "rank_load": [*map(sum, ranks)]})


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts with the numbers of their tables rounded."""
    tables = {key: value for key, value in facts.items() if isinstance(value, dict)}
    return facts | _finished(tables, 1.0)


def _finished(found: Rows, scale: float) -> Rows:
    """Return rows with gradients over their loss scale, ratios of updates, and rounded numbers."""
    weights = found.get(WEIGHTS)
    for row in found.get(GRADIENTS, {}).values():
        row[:3] = (value / scale for value in row[:3])
    for name, row in found.get(UPDATES, {}).items():
        if weights is not None:
            norm = weights[name][0]
            row.append(row[0] / norm if norm else math.nan)
    return {
        kind: {name: [float(f"{x:.{DIGITS}g}") for x in row] for name, row in rows.items()}
        for kind, rows in found.items()
    }
