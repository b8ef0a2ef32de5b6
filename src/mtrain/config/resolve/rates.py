"""The learning rate of each step, and the effect of a longer run on it."""

from __future__ import annotations

from mtrain.config.schedules import SCHEDULES
from mtrain.config.schema.run import RunConfig
from mtrain.config.schema.schedule import end_of_decay as end_of_decay
from mtrain.config.schema.schedule import warmup_of

# Keys that set how long a run, and the decay of its learning rate, are.
LENGTH = ("trainer.train_iters", "optim.decay_iters")


def rate(run: RunConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1, of a resolved run."""
    past_updates = run.optim.schedule_counts == "past_updates"
    # Megatron-LM steps the scheduler after the optimizer: its first update has the rate of 0 past
    # ones.
    counted = step - 1 if past_updates else step
    return rate_at(run, counted, run.optim.lr, run.optim.min_lr)


def rate_at(run: RunConfig, counted: int, highest: float, lowest: float) -> float:
    """Return the rate after `counted` steps of the schedule, for the rates of a parameter group."""
    warmup = warmup_of(run)
    if warmup > 0 and counted <= warmup:
        return highest * counted / warmup
    return SCHEDULES[run.optim.schedule].rate(counted, run, highest, lowest)


def goes_on_alike(run: RunConfig, other: RunConfig, step: int) -> bool:
    """Return whether the first `step` steps of `other`, a run of another length, had the rates that
    they have in `run`.

    They do if the curve does not depend on the length, the decay has not begun, or it ends at the
    same step.
    """
    schedule = SCHEDULES[run.optim.schedule]
    if schedule.unchanged_until is None or end_of_decay(other) == end_of_decay(run):
        return True
    earlier = min(end_of_decay(other), end_of_decay(run))
    return step <= schedule.unchanged_until(run, earlier)


def new_curve(run: RunConfig, other: RunConfig, step: int) -> str:
    """Describe the learning rate after `other`, at `step`, is resumed as `run`."""
    end = end_of_decay(run)
    last = end_of_decay(other)
    return (
        f"its {run.optim.schedule} decay would end at step {end} in place of {last}, and the"
        f" learning rate would go from {rate(other, step):.3g} at step {step} to"
        f" {rate(run, step + 1):.3g} at step {step + 1} and {rate(run, end):.3g} at step {end}"
    )
