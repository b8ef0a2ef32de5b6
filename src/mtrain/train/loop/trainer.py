"""The training loop. Everything optional is a hook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress

from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError, Preempted, TrainingError, warn
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.readings import AHEAD, reduce_report, sync_checks
from mtrain.train.loop.step import Launched, StepResult, TrainContext, launch_step, train_step

FIRST_STEPS = 3
"""Steps of a process that may wait for the device whatever `trainer.sync_debug` says: they compile
kernels.
"""
MOST_BEHIND = 256
"""Steps after which results are read in any case: each holds a few events of the device."""
AGREE_S = 5.0
"""How long a rank whose hook failed waits to learn whether it failed on every rank."""


class Trainer:
    """Steps until `trainer.train_iters`, or until any rank was asked to stop
    (`trainer.stop_signals`).

    The host runs ahead of the device. It reads the results of steps every `log.interval` steps, and
    where the run evaluates or saves. After launching each step it reads only whether to stop, from
    the step `AHEAD` before.
    """

    def __init__(self, context: TrainContext, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.hooks = hooks
        self.failed: list[Hook] = []
        """Hooks that the run goes on without."""
        self.between_steps = False
        self.launched: list[Launched | StepResult] = []
        """Steps whose results were not read yet."""

    def fit(self) -> None:
        """Train to the end.

        Raises:
            TrainingError: the loss or the gradient is not a number, or fp16 updates nothing any
                more; the state of that step is not saved.
            Preempted: stopped on request, after the hooks have saved.
            Exception: whatever a step, or a hook that communicates, failed with.
        """
        self.context.stop.listen(self.context.run.trainer.stop_signals)
        with ExitStack() as stack:
            stack.callback(self.context.close)
            for hook in reversed(self.hooks):
                stack.callback(self._call, hook, "close")
            try:
                stopped = self._steps()
            except BaseException as error:
                saveable = self._failed_everywhere(error)
                for hook in self.hooks:
                    self._call(hook, "on_error", self.context, error, saveable=saveable)
                raise
        if stopped:
            step = self.context.state.step
            goal = self.context.run.trainer.steps
            raise Preempted(f"stopped on request after step {step} of {goal}")

    def _steps(self) -> bool:
        """Return all steps with their hooks; whether it was a stop that ended them."""
        context = self.context
        state = self.context.state
        goal = self.context.run.trainer.steps
        self.between_steps = True
        context.by_time.begin()
        for hook in self.hooks:
            self._call(hook, "start", context)
        make = launch_step if context.world.device.runs_ahead else train_step
        made = 0
        stopped = self._asked() or context.stops
        while state.step < goal and not stopped:
            self.between_steps = False
            mode = context.run.trainer.sync_debug if made >= FIRST_STEPS else "none"
            with sync_checks(context.world.device, mode):
                self.launched.append(make(context, stop_requested=context.stop_requested))
            made += 1
            waits = self._waits()
            known = self.launched if waits else self.launched[:-AHEAD]
            context.stops = any(step.stop for step in known)
            context.by_time.now = due_after(known)
            between = self._works_between()  # hooks clear what was due
            if waits or context.stops or between:
                self._tell()
            stopped = context.stops or (between and self._asked())
        for hook in self.hooks:
            self._call(hook, "finish", context)
        return stopped and state.step < goal

    def _waits(self) -> bool:
        """Return whether to wait for the step that was launched last, the same on every rank."""
        context = self.context
        run = context.run
        step = context.state.step
        if (
            not context.world.device.runs_ahead
            or step == run.trainer.steps
            or step % run.log.interval == 0
        ):
            return True
        if len(self.launched) == MOST_BEHIND:
            return True
        return self._works_between() or any(hook.waits_for(context, step) for hook in self.hooks)

    def _works_between(self) -> bool:
        """Return whether the run evaluates or saves after this step, which may take long."""
        run = self.context.run
        step = self.context.state.step
        every = run.trainer.eval_interval, run.checkpoint.save_interval
        return bool(self.context.by_time.now) or any(steps and step % steps == 0 for steps in every)

    def _asked(self) -> bool:
        """Return whether a rank was asked to stop, the same on every rank; all ranks call it
        together.
        """
        context = self.context
        return context.state.step < context.run.trainer.steps and bool(
            reduce_report(context.world, (), context.stop_requested).stops
        )

    def _tell(self) -> None:
        """Wait for the device, and tell the hooks about the steps before the first one that went
        wrong.

        Raises:
            TrainingError: see `fit`.
        """
        results = [step.result() for step in self.launched]
        self.launched.clear()
        whole = []
        fault = None
        for result in results:
            try:
                check_finite(result)
                check_updates(result, self.context.run)
            except TrainingError as error:
                fault = error
                break
            whole.append(result)
        self.between_steps = fault is None
        for result in whole:
            for hook in self.hooks:
                self._call(hook, "after_step", self.context, result)
        if fault is not None:
            raise fault

    def _call(self, hook: Hook, moment: str, *args: object, **kwargs: object) -> None:
        """One moment of one hook; see `Hook.collective` for its errors."""
        last = moment in ("on_error", "close")
        if hook in self.failed and not last:
            return
        try:
            getattr(hook, moment)(*args, **kwargs)
        except Exception as error:
            if not last and (hook.collective or isinstance(error, MtrainError)):
                raise
            if hook not in self.failed:
                self.failed.append(hook)
                self._warn(hook, moment, error)

    def _warn(self, hook: Hook, moment: str, error: Exception) -> None:
        """Say once, on the first rank that it happens to, what a run goes on without."""
        name = type(hook).__name__
        first = True
        with suppress(Exception):  # without a store each rank says it
            first = self.context.world.store.add(f"hook/{name}", 1) == 1
        if first:
            where = f"rank {self.context.world.rank}, after step {self.context.state.step}"
            goes_on = "" if moment in ("on_error", "close") else "; the run goes on without it"
            warn(f"{name} failed ({where}): {reason(error)}{goes_on}")

    def _failed_everywhere(self, error: BaseException) -> bool:
        """Return whether every rank is between the same two steps with an error of a hook, and the
        state is worth saving.
        """
        if (
            not self.between_steps
            or not isinstance(error, Exception)
            or isinstance(error, MtrainError)
        ):
            return False
        return self.context.world.all_reach(f"failed/{self.context.state.step}", AGREE_S)


def due_after(steps: Iterable[Launched | StepResult]) -> int:
    """Return what is due after steps, of which any may have been the first that asked for it."""
    due = 0
    for step in steps:
        due |= step.due
    return due


def reason(error: BaseException) -> str:
    """Return an error in one line: its kind, where that says more than its text, and the text."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MtrainError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def check_finite(result: StepResult) -> None:
    """Raise TrainingError where a step's loss, or the gradient of a step that was taken, is not a
    number.
    """
    if not math.isfinite(result.loss):
        raise TrainingError(
            f"step {result.step}: the loss is {result.loss}; nothing of this step is saved"
        )
    if result.updated and not math.isfinite(result.grad_norm):
        raise TrainingError(
            f"step {result.step}: the gradient norm is {result.grad_norm}; nothing of this step is"
            " saved"
        )


def check_updates(result: StepResult, run: RunConfig) -> None:
    """Raise TrainingError where fp16 skipped too many updates in a row and its loss scale cannot
    fall any more.
    """
    p = run.precision
    skipped = result.skipped_updates
    if result.loss_scale is None or result.loss_scale_may_fall:
        return
    if skipped >= min(p.max_skipped_updates, run.trainer.steps):
        raise TrainingError(
            f"step {result.step}: the gradient overflowed and the last {skipped} updates were"
            f" skipped, with a loss scale of {result.loss_scale:g} that falls no further"
            f" (precision.min_loss_scale={p.min_loss_scale:g},"
            f" precision.max_skipped_updates={p.max_skipped_updates}); the weights are those of"
            f" step {result.step - skipped}"
        )
