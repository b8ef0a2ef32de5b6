"""Checkpoints at intervals, at the end, on a stop and after errors."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import units
from mtrain.ckpt import state as ckpt_state
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import SAVE
from mtrain.train.loop.result import StepResult


class Checkpoints(Hook):
    """State on disk every `checkpoint.save_interval` steps and `checkpoint.save_minutes`, at the
    end, on a request to stop, and after an error of another hook if every rank can take part.
    """

    collective = True

    def __init__(self, root: Path, progress: Progress, data_facts: dict[str, Any]) -> None:
        self.root = root
        self.progress = progress
        self.data_facts = data_facts
        self.saved_step = 0
        self.path: Path | None = None
        """The last checkpoint of this process."""

    def start(self, context: TrainContext) -> None:
        """Note the step that the run resumes from, which needs no saving."""
        self.saved_step = context.state.step

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Save at the interval, or when it is time."""
        interval = context.run.checkpoint.save_interval
        timely = bool(context.by_time.now & SAVE) and result.step == context.state.step
        if timely or (interval and result.step % interval == 0):
            self._save(context)

    def finish(self, context: TrainContext) -> None:
        """Save the last state."""
        stopped = context.state.step < context.run.trainer.steps
        # A run that is stopped before its first step has something to resume from, too.
        unsaved = self.saved_step != context.state.step or context.state.step == 0
        if (context.run.checkpoint.save_final or stopped) and unsaved:
            self._save(context)

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Save the steps since the last checkpoint, if there are any."""
        if saveable and self.saved_step != context.state.step:
            self._save(context)

    def _save(self, context: TrainContext) -> None:
        state = context.state
        state.hooks = context.hooks.state_dict()
        self.path = ckpt_state.save(self.root, context.run, context.world, state, self.data_facts)
        self.saved_step = state.step
        context.by_time.done(SAVE)
        context.hooks.call("saved", context, self.path)
        # On thousands of ranks, one asks the file system for the sizes of all files.
        if not context.world.is_rank0:
            return
        size = ""
        with suppress(OSError):  # the checkpoint is committed, whatever becomes of this
            size = f" ({units.bytes_(sum(f.stat().st_size for f in self.path.iterdir()))})"
        self.progress.note(f"step {state.step}: saved {self.path}{size}")
