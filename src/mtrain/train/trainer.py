"""The training loop. Everything optional is a hook."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from types import FrameType

from mtrain.config.run import RunConfig
from mtrain.errors import Preempted, TrainingFault
from mtrain.train.step import Parts, StepResult, train_step


class Hook:
    """Something that happens around steps. Every rank runs the same hooks in the same order."""

    def start(self, parts: Parts) -> None:
        """Before the first step."""

    def after_step(self, parts: Parts, result: StepResult) -> None:
        """After each step."""

    def finish(self, parts: Parts) -> None:
        """After the last step of the run, or after the step that a stop was asked in."""


class Trainer:
    """Steps until `trainer.train_iters`, or until any rank was asked to stop (SIGTERM, SIGINT)."""

    def __init__(self, parts: Parts, hooks: Sequence[Hook]) -> None:
        self.parts, self.hooks = parts, hooks
        self.stop_requested = False

    def fit(self) -> None:
        """Train to the end.

        Raises:
            TrainingFault: the loss or the gradient is not a number, or fp16 updates nothing any more; the state of
                that step is not saved.
            Preempted: stopped on request, after the hooks have saved.
        """
        state, goal = self.parts.state, self.parts.run.trainer.train_iters
        self._listen()
        for hook in self.hooks:
            hook.start(self.parts)
        stopped = False
        while state.step < goal and not stopped:
            result = train_step(self.parts, stop_requested=self.stop_requested)
            check_finite(result)
            check_updates(result, self.parts.run)
            for hook in self.hooks:
                hook.after_step(self.parts, result)
            stopped = result.stop and state.step < goal
        for hook in self.hooks:
            hook.finish(self.parts)
        if stopped:
            raise Preempted(f"stopped on request after step {state.step} of {goal}")

    def _listen(self) -> None:
        def request(number: int, frame: FrameType | None) -> None:
            self.stop_requested = True

        signal.signal(signal.SIGTERM, request)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # the local launcher forwards Ctrl-C itself
            signal.signal(signal.SIGINT, request)


def check_finite(result: StepResult) -> None:
    """Raise TrainingFault where a step's loss, or the gradient of a step that was taken, is not a number."""
    if not math.isfinite(result.loss):
        raise TrainingFault(f"step {result.step}: the loss is {result.loss}; nothing of this step is saved")
    if result.updated and not math.isfinite(result.grad_norm):
        raise TrainingFault(
            f"step {result.step}: the gradient norm is {result.grad_norm}; nothing of this step is saved"
        )


def check_updates(result: StepResult, run: RunConfig) -> None:
    """Raise TrainingFault where fp16 skipped too many updates in a row and its loss scale cannot fall any more."""
    p, skipped = run.precision, result.skipped_updates
    if result.loss_scale is None or result.loss_scale_may_fall:
        return
    if skipped >= min(p.max_skipped_updates, run.trainer.train_iters):
        raise TrainingFault(
            f"step {result.step}: the gradient overflowed and the last {skipped} updates were skipped, with a loss "
            f"scale of {result.loss_scale:g} that falls no further (precision.min_loss_scale={p.min_loss_scale:g}, "
            f"precision.max_skipped_updates={p.max_skipped_updates}); the weights are those of step "
            f"{result.step - skipped}"
        )
