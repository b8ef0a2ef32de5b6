"""The specification of a learning-rate curve: everything outside its module reads it from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A RunConfig: its `optim.schedule` lists the curves, so this module cannot import it.
Run = Any


def end_of_decay(run: Run) -> int:
    """Return the step at which the decay of a resolved run ends."""
    return int(run.optim.decay_iters or run.trainer.steps)


def warmup_of(run: Run) -> int:
    """Return the steps of linear warmup of a resolved run."""
    return int(run.optim.warmup_iters)


def progress(step: int, run: Run) -> float:
    """Return the share of the decay that is over at a step: 0 after the warmup, 1 at its end."""
    warmup = warmup_of(run)
    return (step - warmup) / (end_of_decay(run) - warmup)


def end_of_warmup(run: Run, end: int) -> int:
    """Return the last step before a curve begins to fall, if it falls right after the warmup."""
    return warmup_of(run)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning-rate curve; one module of `mtrain.config.schedules` holds it as `SCHEDULE`.

    The warmup is the same for all curves. After it, and up to the end of the decay, the rate is
    min_lr + factor * (lr - min_lr); after the end it is min_lr.
    """

    factor: Callable[[int, Run], float]
    """The factor at a step, counted from 1, of a resolved run."""
    megatron_name: str | None = None
    """Megatron-LM's word after `--lr-decay-style`; None: it has no such curve, and mtrain computes
    the rates.
    """
    of_lr: bool = False
    """The rate is factor * lr, but at least min_lr."""
    never_ends: bool = False
    """The rate follows the factor after the end of the decay as well."""
    unchanged_until: Callable[[Run, int], int] | None = end_of_warmup
    """The last step whose rate does not depend on where the decay ends, for decays that end at a
    step or later; None: no rate depends on it.
    """

    def rate(self, step: int, run: Run, highest: float, lowest: float) -> float:
        """Return the rate of a step after the warmup, for parameters whose rates go from `highest`
        to `lowest`.
        """
        if step > end_of_decay(run) and not self.never_ends:
            return lowest
        factor = self.factor(step, run)
        if self.of_lr:
            return max(lowest, highest * factor)
        return lowest + factor * (highest - lowest)
