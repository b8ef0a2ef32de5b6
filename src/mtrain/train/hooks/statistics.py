"""Statistics of whole tensors every `log.statistics.interval` steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.events.log import STATISTICS
from mtrain.mcore.state.optimizer_state import loss_scale
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.readings import Board, Reading
from mtrain.train.loop.result import StepResult
from mtrain.train.statistics import experts
from mtrain.train.statistics.activations import ACTIVATIONS, ActivationStatistics
from mtrain.train.statistics.experts import EXPERTS, ExpertStatistics
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
    ) -> None:
        """Give events to `metrics` and, on rank 0, the loads of experts to `see`."""
        self.config = run.log.statistics
        self.metrics = metrics
        self.see = see
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
        self.experts: ExpertStatistics | None = None
        width = self.table.width
        if EXPERTS in own.described and context.run.model.moe is not None:
            self.experts = ExpertStatistics(context, own.modules)
            width += self.experts.values.numel()
        self.board = Board(context.world.device, width)

    def due(self, step: int) -> bool:
        """Return whether a step is described."""
        return self.config.interval is not None and step % self.config.interval == 0

    def before_step(self, context: TrainContext) -> None:
        """Begin to add what the forwards compute."""
        if self.due(context.state.step + 1):
            self.table.clear()
            if self.activations is not None:
                self.activations.watch(self.table)
            if self.experts is not None:
                self.experts.watch()

    def before_update(self, context: TrainContext) -> None:
        """Add weights and gradients, before those are clipped."""
        if self.due(context.state.step + 1):
            begin_phase("statistics")
            if self.activations is not None:
                self.activations.leave()
            if self.experts is not None:
                self.experts.leave()
            scale = loss_scale(context.state.optimizer)
            self.scale = 1.0 if scale is None else scale[0]
            self.weights.before_update(self.table)

    def after_update(self, context: TrainContext) -> None:
        """Add updates and moments, and add up the parts of all ranks."""
        step = context.state.step + 1
        if self.due(step):
            begin_phase("statistics")
            self.weights.after_update(self.table)
            values = self.table.reduced(None if self.experts is None else self.experts.values)
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
            if self.experts is not None:
                routed, lists = self.experts.read(numbers[self.table.width :])
                rows = _finished(routed, 1.0)[EXPERTS]
                facts = {"of": EXPERTS, "columns": experts.COLUMNS, "rows": rows}
                self.metrics.note(STATISTICS, step, **facts, **_finished(lists, 1.0))
                ranks = zip(*lists.get("rank_loads", {}).values(), strict=True)
                if "loads" in lists:
                    self.see(step, {"expert_load": lists["loads"], "rank_load": [*map(sum, ranks)]})


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
