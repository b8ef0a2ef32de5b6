"""Metrics as event files, which TensorBoard shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext

FOLDER = "tensorboard"
"""The folder of event files in the run folder: `tensorboard --logdir runs` shows all runs."""


class TensorBoard(Hook):
    """Scalars of every step and of every evaluation, written by rank 0."""

    def __init__(self, folder: Path, kind: type[Any]) -> None:
        """Write into `folder` by the class `kind`, torch's `SummaryWriter`."""
        self.folder = folder
        self.kind = kind
        self.writer: Any = None

    @classmethod
    def of(cls, run: RunConfig, folder: Path) -> Self:
        """Return the logger of a run.

        Raises:
            BadEnvironment: the package tensorboard is not installed, on any rank: one that failed
                while others train would hold them up.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadEnvironment(
                "log.hooks=[tensorboard]: cannot write event files because the package tensorboard"
                f" is not installed ({error}). Use pip install tensorboard, or remove the hook"
            ) from error
        return cls(folder / FOLDER, SummaryWriter)

    def start(self, context: TrainContext) -> None:
        """Open a file; TensorBoard then hides the lines of steps that a resumed run repeats."""
        if context.world.is_rank0:
            self.writer = self.kind(str(self.folder), purge_step=context.state.step + 1)

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Write each number under its name in `metrics.jsonl`."""
        if self.writer is None:
            return
        for name, value in metrics.items():
            # A bool, such as `skipped`, becomes 0 or 1.
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(name, float(value), step)

    def saved(self, context: TrainContext, path: Path) -> None:
        """Flush: a run that resumes from this checkpoint does not write earlier steps again."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()


HOOK = TensorBoard
