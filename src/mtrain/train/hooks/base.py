"""The hook: what happens around steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain.train.loop.step import StepResult, TrainContext


class Hook:
    """Something that happens around steps. Every rank runs the same hooks in the same order."""

    collective = False
    """Whether it communicates.

    Ranks wait for each other in such a hook, so its error on one rank ends the run; an error of any
    other hook is a warning, and the run goes on without that hook.
    """

    def start(self, context: TrainContext) -> None:
        """Before the first step."""

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether this hook acts right after a step, before the next one begins.

        After other steps the device may be behind the host. Their `after_step` is called when the
        device is next waited for: at `log.interval`, and where the run evaluates or saves.
        """
        return False

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """After each step, in order; several may be told at once, see `waits_for`."""

    def finish(self, context: TrainContext) -> None:
        """After the last step of the run, or after the step that a stop was asked in."""

    def on_error(self, context: TrainContext, error: BaseException, *, saveable: bool) -> None:
        """After an error that ends the run.

        `saveable`: it came between two steps and on every rank, so all ranks are here and the state
        is whole. Otherwise nothing may communicate: another rank may be gone.
        """

    def close(self) -> None:
        """Last of all, however the run ends, also where the hook or another one failed."""
