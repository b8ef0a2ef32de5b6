"""The training loop. Everything optional is a hook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError, Preempted, TrainingError
from mtrain.train.hooks.base import Hook, HookList
from mtrain.train.loop.context import Stopped, TrainContext
from mtrain.train.loop.readings import AHEAD, reduce_report, sync_checks
from mtrain.train.loop.result import Launched, StepResult, step_record
from mtrain.train.loop.step import launch_step, train_step

FIRST_STEPS = 3
"""Steps that may wait for the device despite `trainer.sync_debug`: they compile kernels."""
MOST_BEHIND = 256
"""Steps after which results are read in any case: each holds a few events of the device."""
AGREE_S = 5.0
"""Seconds that a rank whose hook failed waits to learn whether it failed on every rank."""


class Trainer:
    """Steps until `trainer.train_iters`, or until any rank gets a request to stop
    (`trainer.stop_signals`).

    The host runs ahead of the device. It reads the results of steps every `log.interval` steps, and
    where the run evaluates or saves. After launching each step it reads only whether to stop, from
    the step `AHEAD` before.
    """

    def __init__(self, context: TrainContext, hooks: Sequence[Hook]) -> None:
        self.context = context
        self.hooks = HookList(hooks)
        context.hooks = self.hooks
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
        context = self.context
        context.stop.listen(context.run.trainer.stop_signals)
        with ExitStack() as stack:
            # First in, last out: hooks may read samples until they are closed.
            stack.callback(context.close)
            for hook in reversed(self.hooks.hooks):
                stack.callback(self.hooks.call_one, hook, "close", context)
            try:
                stopped = self._steps()
            except BaseException as error:
                saveable = self._failed_everywhere(error)
                self.hooks.call("on_error", context, error, saveable=saveable)
                raise
        if stopped:
            step = context.state.step
            goal = context.run.trainer.steps
            raise Preempted(f"stopped on request after step {step} of {goal}")

    def _steps(self) -> bool:
        """Run all steps with their hooks; return whether a stop ended them."""
        context = self.context
        state = self.context.state
        goal = self.context.run.trainer.steps
        self.between_steps = True
        context.by_time.begin()
        self.hooks.load_state_dict(state.hooks)
        self.hooks.call("start", context)
        make = launch_step if context.world.device.runs_ahead else train_step
        made = 0
        # A request that came while the run was assembled, or in an evaluation of `start`.
        stopped = self._stop_requested() or context.stops
        context.meter.loaded(state.step)
        while state.step < goal and not stopped:
            self.hooks.before_step(context)
            self.between_steps = False
            mode = context.run.trainer.sync_debug if made >= FIRST_STEPS else "none"
            try:
                with sync_checks(context.world.device, mode):
                    self.launched.append(make(context, stop_requested=context.stop_requested))
            except Stopped:
                context.stops = True
                stopped = True
                self._report()
                break
            made += 1
            context.meter.stepped(state.step, context.prefetcher.waited_s)
            waits = self._waits()
            known = self.launched if waits else self.launched[:-AHEAD]
            context.stops = any(step.stop for step in known)
            context.by_time.now = due_after(known)
            # Read it before `_report`: hooks clear requests once they have served them.
            between = self._works_between()
            if waits or context.stops or between:
                self._report()
            stopped = context.stops or (between and self._stop_requested())
        context.meter.over()
        self.hooks.call("finish", context)
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
        # Steps hold events of the device: a long log interval would hold thousands of them.
        if len(self.launched) == MOST_BEHIND:
            return True
        return self._works_between() or self.hooks.waits_for(context, step)

    def _works_between(self) -> bool:
        """Return whether the run evaluates or saves after this step, which may take long."""
        run = self.context.run
        step = self.context.state.step
        every = (run.trainer.eval_interval, run.checkpoint.save_interval)
        return bool(self.context.by_time.now) or any(steps and step % steps == 0 for steps in every)

    def _stop_requested(self) -> bool:
        """Return whether any rank got a request to stop, alike on every rank; a collective."""
        context = self.context
        if context.state.step >= context.run.trainer.steps:
            return False
        metrics = reduce_report(context.world, context.table, (), context.stop_requested)
        return metrics["stops"] > 0

    def _report(self) -> None:
        """Wait for the device, and report to the hooks the steps before the first one that failed.

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
            report_step(self.context, result)
        if fault is not None:
            raise fault

    def _failed_everywhere(self, error: BaseException) -> bool:
        """Return whether all ranks are between the same steps with a hook's error, worth a save."""
        if not self.between_steps or not isinstance(error, Exception):
            return False
        # An error of mtrain's own (damage, a stop) says that the state should not be saved.
        if isinstance(error, MtrainError):
            return False
        return self.context.world.all_reach(f"failed/{self.context.state.step}", AGREE_S)


def report_step(context: TrainContext, result: StepResult) -> None:
    """Report a step to the hooks of a run: its metrics are logged before anything is saved, so a
    resumed run misses no line.
    """
    record = step_record(context.run, context.world.size, result)
    for measure in context.measures:
        record |= measure(context, result)
    context.hooks.log(context, result.step, record)
    context.hooks.call("after_step", context, result)


def due_after(steps: Iterable[Launched | StepResult]) -> int:
    """Return what is due after steps, of which any may have been the first to request it."""
    due = 0
    for step in steps:
        due |= step.due
    return due


def check_finite(result: StepResult) -> None:
    """Raise TrainingError if a step's loss, or a taken step's gradient, is not a number."""
    found = {"loss": result.loss}
    if result.updated:
        found["gradient norm"] = result.grad_norm
    for name, value in found.items():
        if not math.isfinite(value):
            error = TrainingError(
                f"step {result.step}: the {name} is {value}; nothing of this step is saved"
            )
            error.alert = "non_finite"
            raise error


def check_updates(result: StepResult, run: RunConfig) -> None:
    """Raise TrainingError if fp16 skipped too many updates and its loss scale cannot fall."""
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
