"""A hook of mtrain: `best.json` in the run folder names the checkpoint with the lowest loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mtrain.config.schema.run import RunConfig
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext


class BestLoss(Hook):
    """Notes the best validation loss, and which checkpoint came after it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.best: float | None = None
        self.step = 0
        self.improved = False

    @classmethod
    def of(cls, run: RunConfig, folder: Path) -> Self:
        """Return the hook of a run that writes into `folder`."""
        return cls(folder / "best.json")

    def after_evaluation(self, context: TrainContext, loss: float) -> None:
        """Compare an evaluation with the best one."""
        if self.best is None or loss < self.best:
            self.best = loss
            self.step = context.state.step
            self.improved = True

    def saved(self, context: TrainContext, path: Path) -> None:
        """Write the file on rank 0, after the first checkpoint since the best loss."""
        if self.improved and context.world.is_rank0:
            best = {"loss": self.best, "step": self.step, "checkpoint": path.name}
            self.file.write_text(json.dumps(best) + "\n")
        self.improved = False

    def state_dict(self) -> dict[str, Any]:
        """Return the best loss, so that a resumed run goes on comparing with it."""
        return {} if self.best is None else {"best": self.best, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best loss of the run so far."""
        self.best = state["best"]
        self.step = state["step"]
