"""Checkpoints at intervals, at the end, on a stop and after errors."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import units
from mtrain.ckpt import local as ckpt_local
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt.local import Local
from mtrain.ckpt.saving.background import BackgroundSaves, Limits
from mtrain.ckpt.saving.process import WriterProcess
from mtrain.config.machine.hardware import free_memory_bytes
from mtrain.config.schema.run import RunConfig
from mtrain.errors import TrainingError, warn
from mtrain.goodput.meter import SAVING
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import COMMITTED, FAILED, SAVE
from mtrain.train.loop.result import StepResult
from mtrain.units import MIB
from mtrain.world.rank_env import RankEnv


class Checkpoints(Hook):
    """State on disk every `checkpoint.save_interval` steps and `checkpoint.save_minutes`, at the
    end, on a request to stop, and after an error of another hook if every rank can take part.

    With `checkpoint.async_save` a save begins after a step and ends after a later one. At most one
    is under way: the next one waits for it.

    Every `checkpoint.local_interval` steps without such a save, a local checkpoint is made, unless
    a save is under way. Local ones serve a restart, so other hooks do not hear of them, and a run
    that ends with its state saved leaves none.
    """

    collective = True
    cause = SAVING

    def __init__(
        self,
        root: Path,
        progress: Progress,
        data_facts: dict[str, Any],
        writer: WriterProcess | None = None,
        local: Local | None = None,
        *,
        from_local: bool = False,
    ) -> None:
        """Save into `root`; in the background `writer` does it, or one that is started when it is
        needed.

        `local`: the place of local checkpoints; `from_local`: the run continues from one of them,
        so the step that it begins with is not saved in `root`.
        """
        self.root = root
        self.progress = progress
        self.data_facts = data_facts
        self.local = local
        self.from_local = from_local
        self.announced = False
        """A local checkpoint was reported; the others are not."""
        self.saved_step = 0
        """The step of the last save into `root`, which may be under way."""
        self.path: Path | None = None
        """The last checkpoint of this process."""
        self.writer = writer
        self.saves: BackgroundSaves | None = None
        self.failures = 0
        """Saves that failed since the last one that did not."""
        self.waits = 0
        self.waited_s = 0.0
        """The number and the time of waits for a save that was under way when the next was due."""
        self.unsecured = False
        """Tensors of a save may still be copied."""
        self.reserved = False
        """Saves in the background have their memory, or have requested it."""
        self.blocked_s = 0.0
        """The time that the save under way has kept the loop."""

    def start(self, context: TrainContext) -> None:
        """Note the step that the run resumes from, which needs no saving."""
        self.saved_step = -1 if self.from_local else context.state.step
        config = context.run.checkpoint
        if config.async_save:
            here = RankEnv.here()
            limits = Limits(
                staging_bytes=None if config.staging_mib is None else config.staging_mib * MIB,
                free_bytes=lambda: free_memory_bytes() // (2 * here.local_size),
                retries=config.retries,
                timeout_s=config.barrier_timeout_s,
            )
            ranks = ckpt_state.meeting_of(context.world, context.run)
            device = context.world.device
            self.saves = BackgroundSaves(ranks, device, here.local_rank, limits, self.writer)

    def staging_bytes(self) -> int:
        """Return the host memory of this rank that saves in the background copy to."""
        return 0 if self.saves is None else self.saves.staging_bytes

    def before_update(self, context: TrainContext) -> None:
        """Wait until the update may change the saved tensors, and note the progress of the save."""
        if self.saves is None or self.saves.pending is None:
            return
        if self.unsecured:
            begun = time.monotonic()
            self.saves.secured()
            self.unsecured = False
            problem = self._agreed_problem(context) if self.saves.in_waves else ""
            self.blocked_s += time.monotonic() - begun
            if problem:
                self._failed(context, problem)
                return
        self.saves.poll()
        if self.saves.problem:
            context.by_time.saving = FAILED
        elif self.saves.committed:
            context.by_time.saving = COMMITTED

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Save at the interval, or when it is time; act on the end of a save in the background."""
        if result.step == context.state.step and self.saves is not None:
            if context.by_time.save_failed:
                self._settle(context)
            elif context.by_time.now & COMMITTED:
                self._committed(context, self.saves)
        interval = context.run.checkpoint.save_interval
        timely = bool(context.by_time.now & SAVE) and result.step == context.state.step
        if timely or (interval and result.step % interval == 0):
            self._save(context)
        elif self._is_local_due(context, result):
            self._save_locally(context)
        elif self.saves is not None and not self.reserved and _saves_often(context.run):
            # After a step the optimizer has all of its state.
            ckpt_state.reserve(self.saves, context.run, context.world, context.state)
        self.reserved = True

    def finish(self, context: TrainContext) -> None:
        """Save the last state."""
        self._settle(context)
        stopped = context.state.step < context.run.trainer.steps
        # A run that is stopped before its first step has something to resume from, too.
        unsaved = self.saved_step != context.state.step or context.state.step == 0
        if (context.run.checkpoint.save_final or stopped) and unsaved:
            self._save(context, last=True)
        if context.world.is_rank0:
            ckpt_local.remove(self.root.parent)
        elif self.local is not None and self.local.machine and context.world.local_rank == 0:
            ckpt_local.clear(self.local)

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Save the steps since the last checkpoint, if there are any.

        Where this process restarts and the state cannot be saved, let the writers commit the save
        that is staged in memory.
        """
        if saveable:
            self._settle(context)
            if self.saved_step != context.state.step:
                self._save(context, last=True)
        elif self.saves is not None and context.run.resilience.in_process:
            self.saves.finish_alone(context.run.checkpoint.barrier_timeout_s)

    def close(self) -> None:
        """End the writer."""
        if self.saves is not None:
            self.saves.close()
        elif self.writer is not None:
            self.writer.close()

    def _is_local_due(self, context: TrainContext, result: StepResult) -> bool:
        """Return whether a local checkpoint is made after a step: the same on every rank."""
        config = context.run.checkpoint
        if self.local is None or not config.local_interval or result.step % config.local_interval:
            return False
        # The newest state only: steps that are made ahead change it.
        if result.step != context.state.step:
            return False
        if result.step == context.run.trainer.steps and config.save_final:
            return False
        return self.saves is None or self.saves.pending is None

    def _save_locally(self, context: TrainContext) -> None:
        assert self.local is not None
        state = context.state
        state.hooks = context.hooks.state_dict()
        place = (self.local.root, context.run, context.world, state, self.data_facts)
        if self.saves is not None:
            ckpt_state.begin_save(self.saves, *place, owner=self.local.owner)
            self.unsecured = True
            return
        problem = ""
        path = self.local.root
        try:
            path = ckpt_state.save(*place, owner=self.local.owner)
        except TrainingError as error:
            if not error.shared:
                raise
            problem = str(error)
        if self.local.machine is not None:  # each machine has saved by itself
            problem = ckpt_state.meeting_of(context.world, context.run).barrier(problem)
        if problem:
            self._refused(context, problem, last=False)
            return
        self._saved_locally(context, path)

    def _save(self, context: TrainContext, *, last: bool = False) -> None:
        state = context.state
        if self.saves is not None and self.saves.pending is not None:
            self._wait_for_earlier(context)
        state.hooks = context.hooks.state_dict()
        context.by_time.done(SAVE)
        self.saved_step = state.step
        save = (self.root, context.run, context.world, state, self.data_facts)
        if self.saves is not None:
            begun = time.monotonic()
            ckpt_state.begin_save(self.saves, *save)
            self.blocked_s = time.monotonic() - begun
            self.unsecured = True
            if last:
                self._settle(context, last=True)
            return
        try:
            path = ckpt_state.save(*save)
        except TrainingError as error:
            # Not shared: a rank is missing, so there is nobody to go on with.
            if not error.shared:
                raise
            self._refused(context, str(error), last=last)
            return
        self._saved(context, path)

    def _wait_for_earlier(self, context: TrainContext) -> None:
        assert self.saves is not None
        assert self.saves.pending is not None
        begun = time.monotonic()
        earlier = self.saves.pending.step
        self._settle(context)
        seconds = time.monotonic() - begun
        self.waits += 1
        self.waited_s += seconds
        if context.world.is_rank0:
            self.progress.note(
                f"step {context.state.step}: waited {seconds:.1f} s for the save of step {earlier}"
                f" ({units.number_of(self.waits, 'wait')} so far, {self.waited_s:.1f} s)"
            )

    def _settle(self, context: TrainContext, *, last: bool = False) -> None:
        """Wait for the end of the save that is under way, if there is one; every rank calls it."""
        if self.saves is None or self.saves.pending is None:
            return
        self.saves.finish()
        self.unsecured = False
        problem = self._agreed_problem(context)
        if problem:
            self._failed(context, problem, last=last)
        else:
            self._committed(context, self.saves)

    def _agreed_problem(self, context: TrainContext) -> str:
        """Return the problem of a rank, on every rank.

        A rank whose disk is slow may come late: the others wait for it here, and not in a
        collective with its shorter timeout.
        """
        assert self.saves is not None
        return ckpt_state.meeting_of(context.world, context.run).barrier(self.saves.problem)

    def _committed(self, context: TrainContext, saves: BackgroundSaves) -> None:
        context.by_time.save_settled()
        how = f", written in {saves.seconds:.1f} s; the loop waited {self.blocked_s:.2f} s"
        path = ckpt_state.end_save(saves, context.state)
        if self._is_local(path):
            self._saved_locally(context, path, how)
        else:
            self._saved(context, path, how)

    def _failed(self, context: TrainContext, problem: str, *, last: bool = False) -> None:
        """Give up the save in the background, on every rank."""
        assert self.saves is not None
        pending = self.saves.pending
        root = self.root if pending is None else pending.root
        context.by_time.save_settled()
        self.unsecured = False
        self.saves.abort()
        # Before rank 0 removes the files: no writer works on them any more.
        ckpt_state.meeting_of(context.world, context.run).barrier()
        if self.saves.leads:
            self.saves.sweep(root)
        self._refused(context, problem, last=last)

    def _refused(self, context: TrainContext, problem: str, *, last: bool) -> None:
        """End the run after a save that failed, or warn and go on."""
        config = context.run.checkpoint
        self.failures += 1
        if config.on_failure == "continue" and not last:
            if self.failures < config.max_failures:
                # The end of the run saves this state again, if no later save did.
                self.saved_step = -1
                if context.world.is_rank0:
                    warn(f"{problem}; the run goes on (checkpoint.on_failure=continue)")
                return
            problem += (
                f"; {units.number_of(self.failures, 'checkpoint')} in a row could not be written"
                f" (checkpoint.max_failures={config.max_failures})"
            )
        # `shared`: every rank raises it, and one of them prints it
        failed = TrainingError(problem)
        failed.shared = True
        raise failed

    def _saved(self, context: TrainContext, path: Path, how: str = "") -> None:
        self.path = path
        self.failures = 0
        context.hooks.call("saved", context, path)
        # On thousands of ranks, one asks the file system for the sizes of all files.
        if context.world.is_rank0:
            self.progress.note(f"step {context.state.step}: saved {path}{_size(path, how)}")

    def _is_local(self, path: Path) -> bool:
        return self.local is not None and path.parent == self.local.root

    def _saved_locally(self, context: TrainContext, path: Path, how: str = "") -> None:
        self.failures = 0
        # The account of the run's time: the step is not lost to a restart.
        context.meter.give_sign()
        if context.world.is_rank0 and not self.announced:
            self.progress.note(
                f"step {context.state.step}: first local checkpoint {path}{_size(path, how)}; each"
                " replaces the one before"
            )
        self.announced = True


def _saves_often(run: RunConfig) -> bool:
    """Return whether a run saves at an interval, so that it needs memory for that anyway."""
    return bool(run.checkpoint.save_interval) or run.checkpoint.save_minutes is not None


def _size(path: Path, how: str) -> str:
    """Return the bytes of a checkpoint as words; empty if they cannot be read."""
    size = ""
    with suppress(OSError):  # it is committed, whatever becomes of this
        size = f" ({units.bytes_(sum(f.stat().st_size for f in path.iterdir()))}{how})"
    return size
