"""The hook: the interface of work around the steps of a run, and the list of its hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError, warn
from mtrain.train.loop.context import Moments, TrainContext
from mtrain.train.loop.result import StepResult

LAST = ("on_error", "close")
"""Moments of the end of a run, which also a hook gets that failed before."""
UNCHARGED = ("log", "close")
"""Moments whose time stays with the cause around them, see `Hook.cause`."""


class Hook:
    """An action around steps. Every rank runs the same hooks in the same order.

    A package publishes a subclass under the entry point group `mtrain.hooks`, and `log.hooks` names
    it. All methods do nothing unless they are overridden.

    A method runs on every rank, in the main thread, between two pieces of work of the device, and
    its time is a part of the run's: a rank that is slow holds up all others. Reading a tensor of
    the device, other than in `after_step` and later moments, makes the host wait for the device.
    Only a hook with `collective` may call functions of `torch.distributed`, in the same order on
    every rank. Writing files is for one rank, `context.world.is_rank0`. Nothing may change the
    weights, the optimizer or the samples: a resumed run would differ.
    """

    collective = False
    """True if the hook communicates.

    Ranks wait for each other in such a hook, so its error on one rank ends the run; an error of any
    other hook is a warning, and the run goes on without that hook.
    """
    cause: str | None = None
    """The cause of `goodput` that its time belongs to; None: that of the loop around it."""
    name = ""
    """The key of its state in checkpoints; a hook that `log.hooks` enables gets the name there."""

    @classmethod
    def of(cls, run: RunConfig, folder: Path) -> Self:
        """Return the hook of a run that writes into `folder`; called for names of `log.hooks`."""
        return cls()

    def start(self, context: TrainContext) -> None:
        """Prepare before the first step, after `load_state_dict`."""

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether this hook acts right after a step, before the next one begins.

        After other steps the device may be behind the host. Their `after_step` is called when the
        host next waits for the device: at `log.interval`, and where the run evaluates or saves.
        """
        return False

    def before_step(self, context: TrainContext) -> None:
        """Act before step `context.state.step + 1` is launched.

        The device may still work on earlier steps.
        """

    def before_retry(self, context: TrainContext) -> None:
        """Act before forward and backward of step `context.state.step + 1` run once more, from the
        same start: their first results are dropped (`resilience.rerun`, `log.on_anomaly`).
        """

    def before_update(self, context: TrainContext) -> None:
        """Act between backward and the update: gradients are added over micro-batches and ranks.

        Reading them on the host makes the host wait for the device.
        """

    def after_update(self, context: TrainContext) -> None:
        """Act after the weights of step `context.state.step + 1` are updated, or were not: see
        `StepResult.updated`. The device may not have done it yet.
        """

    def log(self, context: TrainContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step, or of an evaluation after it, as `metrics.jsonl` has them.

        Called on every rank with the same values; a logger writes where `context.world.is_rank0`.
        """

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Act after a step; several steps may be reported at once, in order: see `waits_for`."""

    def on_anomaly(self, context: TrainContext, report: Mapping[str, Any]) -> None:
        """Act on the report of an anomalous step (`log.on_anomaly`), before its update is made."""

    def after_evaluation(self, context: TrainContext, loss: float) -> None:
        """Act after an evaluation of the model after step `context.state.step`, with its loss."""

    def saved(self, context: TrainContext, path: Path) -> None:
        """Act after a checkpoint was committed at `path`, on every rank."""

    def finish(self, context: TrainContext) -> None:
        """Act after the last step of the run, or after the step in which a stop was requested."""

    def after_run(self, context: TrainContext) -> None:
        """Act after a run that made its last step, once everything is saved and closed."""

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """Act after an error that ends the run.

        `saveable`: the error came between two steps and on every rank, so all ranks are here and
        the state is whole. Otherwise nothing may communicate: another rank may be gone.
        """

    def close(self) -> None:
        """Release all resources, however the run ends, also where it or another hook failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, on every rank, before `start`."""


class HookList(Moments):
    """The hooks of a run, and those that it goes on without."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self.hooks = tuple(hooks)
        self.before = [hook for hook in hooks if _overrides(hook, "before_step")]
        """Hooks that act before steps: the others cost a step nothing."""
        self.failed: list[Hook] = []

    def call(self, moment: str, context: TrainContext, *args: object, **kwargs: object) -> None:
        """Call a moment of every hook, in order; see `Hook.collective` for errors."""
        for hook in self.hooks:
            self.call_one(hook, moment, context, *args, **kwargs)

    def call_one(
        self, hook: Hook, moment: str, context: TrainContext, *args: object, **kwargs: object
    ) -> None:
        """Call a moment of one hook."""
        # A hook whose `start` failed has no file to write to; its `close` still runs.
        if hook in self.failed and moment not in LAST:
            return
        given = args if moment == "close" else (context, *args)
        cause = None if moment in UNCHARGED else hook.cause
        before = None if cause is None else context.meter.enter(cause)
        try:
            getattr(hook, moment)(*given, **kwargs)
        except Exception as error:
            if moment not in LAST and (hook.collective or isinstance(error, MtrainError)):
                raise
            # One warning per hook: a full disk fails at every step.
            if hook not in self.failed:
                self.failed.append(hook)
                _warn(hook, moment, context, error)
        finally:
            if before is not None:
                context.meter.enter(before)

    def before_step(self, context: TrainContext) -> None:
        """Call the moment before a step."""
        for hook in self.before:
            self.call_one(hook, "before_step", context)

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether any hook acts right after a step."""
        return any(hook.waits_for(context, step) for hook in self.hooks)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks that have one, by name."""
        states = {_name(hook): hook.state_dict() for hook in self.hooks}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each hook its state; a hook that the checkpoint does not know starts afresh."""
        for hook in self.hooks:
            if _name(hook) in states:
                hook.load_state_dict(states[_name(hook)])


def _overrides(hook: Hook, moment: str) -> bool:
    return getattr(type(hook), moment) is not getattr(Hook, moment)


def _name(hook: Hook) -> str:
    return hook.name or type(hook).__name__


def _warn(hook: Hook, moment: str, context: TrainContext, error: Exception) -> None:
    """Warn, on the first rank that it happens to, of the hook that a run goes on without."""
    name = type(hook).__name__
    first = True
    with suppress(Exception):  # without a store each rank warns
        first = context.world.store.add(f"hook/{name}", 1) == 1
    if first:
        where = f"rank {context.world.rank}, after step {context.state.step}"
        goes_on = "" if moment in LAST else "; the run goes on without it"
        warn(f"{name} failed ({where}): {reason(error)}{goes_on}")


def reason(error: BaseException) -> str:
    """Return an error in one line: its kind, where that says more than its text, and the text."""
    # torch's errors are pages long; their first line names the failure.
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MtrainError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")
