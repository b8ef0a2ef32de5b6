"""A stop for runs whose loss has risen and stays high.

Every run ends when its loss is not finite. A loss that doubles and stays there wastes the rest of
the run as well, and nobody may notice for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrain.errors import TrainingError
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult
from mtrain.train.running_median import RunningMedian

WINDOW = 100
"""The number of steps whose median loss is the reference; no check happens before as many."""
FACTOR = 2.0
"""The factor of the median that counts as high; noise between batches stays far below it."""
PATIENCE = 10
"""Consecutive high steps that end the run; a single bad batch does not."""


class LossSpikes(Hook):
    """Ends a run whose loss was above `FACTOR` times its running median for `PATIENCE` steps."""

    def __init__(self) -> None:
        self.losses = RunningMedian(WINDOW, WINDOW)
        self.above = 0

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Compare the loss. It is the same on every rank, so all ranks stop at the same step.

        Raises:
            TrainingError: the loss stayed high. The steps since the last checkpoint are not saved.
        """
        usual = self.losses.middle
        if result.loss <= FACTOR * usual:
            self.above = 0
            # High losses stay out of the median, which would otherwise rise with them.
            self.losses.add(result.loss)
            return
        self.above += 1
        if self.above >= PATIENCE:
            raise TrainingError(
                f"log.hooks=[loss_spikes]: step {result.step}: cannot go on because the loss"
                f" {result.loss:.4f} is above {FACTOR:g} times its median {usual:.4f} for"
                f" {PATIENCE} steps. Use a checkpoint before step {result.step - PATIENCE + 1} with"
                " a lower optim.lr or with optim.skip_above_grad_norm"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the window and the steps above their median."""
        return {"losses": list(self.losses.values), "above": self.above}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the window of the resumed run."""
        self.losses.load(state["losses"])
        self.above = state["above"]


HOOK = LossSpikes
