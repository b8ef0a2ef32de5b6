"""A torch.profiler trace of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult


class Profile(Hook):
    """A torch.profiler trace of step `trainer.profile_step` of the ranks `trainer.profile_ranks`,
    in the run folder as `trace_rank0.json.gz`.
    """

    def __init__(self, folder: Path, step: int, ranks: Sequence[int]) -> None:
        self.folder = folder
        self.step = step
        self.ranks = ranks
        self.profiler: Any = None

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether the trace begins or ends after this step: it has one step only."""
        return step in (self.step - 1, self.step)

    def start(self, context: TrainContext) -> None:
        """Begin at once if the first step is the one to profile."""
        self._begin(context)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """End the trace after its step, or begin it after the step before."""
        if self.profiler is not None:
            # Forget it first: if stopping fails, `close` must not stop it again.
            profiler = self.profiler
            self.profiler = None
            profiler.stop()
            profiler.export_chrome_trace(
                str(self.folder / f"trace_rank{context.world.rank}.json.gz")
            )
        # Of several steps that are reported at once, only the last is before the next one.
        if result.step == context.state.step:
            self._begin(context)

    def close(self) -> None:
        """Stop a trace that an error cut off."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _begin(self, context: TrainContext) -> None:
        if context.state.step == self.step - 1 and context.world.rank in self.ranks:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
