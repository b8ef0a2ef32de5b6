"""The result of a step, and a step whose end the device has not come to yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mtrain.train.loop.readings import REPORT, Clock, Means, Reading


@dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on every rank but for `seconds`."""

    step: int
    loss: float
    """Mean cross entropy of the global batch in nats, as `trainer.loss_average` says."""
    grad_norm: float
    """Global norm of the gradient before clipping; not a number where it overflowed in fp16."""
    lr: float
    """The rate that the update had, or would have had."""
    z_loss: float
    """The mean that z-loss adds to the loss; 0 without `trainer.z_loss_coeff`."""
    token_accuracy: float
    """The share of `tokens` with the largest logit; 0 without `log.token_accuracy`."""
    updated: bool
    """False where the update was skipped: an overflow in fp16, or a norm above
    `optim.skip_above_grad_norm`.
    """
    skipped_updates: int
    """Updates skipped in a row, up to this step."""
    loss_scale: float | None
    """fp16: the factor on the loss of this step."""
    loss_scale_may_fall: bool
    """True where skipping updates lowers the loss scale: there is one, above its floor."""
    tokens: int
    """Predictions that count."""
    read: int
    """Tokens that are there, predicted from or not: those that speed counts."""
    positions: int
    """The same with what pads samples."""
    flops: float
    """Model FLOPs of the tokens that are there, each attending to half of its document."""
    full_flops: float
    """The same with all of attention."""
    batch_size: int
    """Samples that it took."""
    consumed_samples: int
    stop: bool
    """A rank was asked to stop."""
    due: int = 0
    """What the clock of rank 0 asked for before this step; see `interruptions`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of this rank by phase: data, forward_backward, optimizer, and all of the step;
    data_wait: the part of data in which samples were waited for that were not read yet.
    """

    def result(self) -> StepResult:
        """Return itself: the device has ended this step, other than one that is `Launched`."""
        return self

    @property
    def padding_share(self) -> float:
        """Return the share of positions that hold no token."""
        return 1 - self.read / self.positions

    @property
    def data_wait_share(self) -> float:
        """Return the share of the step in which this rank waited for samples."""
        return min(1.0, self.seconds["data_wait"] / max(self.seconds["step"], 1e-9))


class Launched:
    """A step that the device was given; its result is known once the device has ended it."""

    def __init__(self, reading: Reading, clock: Clock, known: dict[str, Any]) -> None:
        self._reading = reading
        self._clock = clock
        self._known = known

    @cached_property
    def stop(self) -> bool:
        """Return true where a rank was asked to stop before this step; waits for the end of the
        step.
        """
        return Means.of(self._reading.read()).stops > 0

    @cached_property
    def due(self) -> int:
        """What the clock of rank 0 asked for before this step; waits for the end of the step."""
        return Means.of(self._reading.read()).due

    def result(self) -> StepResult:
        """Return the result of the step; waits for its end."""
        row = self._reading.read()
        means = Means.of(row)
        known = dict(self._known)
        if len(row) > REPORT:
            known["grad_norm"] = row[REPORT]
        return StepResult(
            loss=means.loss,
            z_loss=means.z_loss,
            token_accuracy=means.token_accuracy,
            tokens=means.tokens,
            read=means.read,
            flops=means.flops,
            full_flops=means.full_flops,
            stop=means.stops > 0,
            due=means.due,
            seconds=self._clock.seconds(),
            **known,
        )
