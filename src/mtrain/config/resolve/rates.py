"""The learning rate of a step, as megatron-core's OptimizerParamScheduler computes it, and longer
runs.
"""

from __future__ import annotations

import math

from mtrain.config.schema.run import RunConfig

LENGTH = ("trainer.train_iters", "optim.decay_iters")
"""Keys that set the length of a run and of its learning-rate decay."""


def end_of_decay(run: RunConfig) -> int:
    """Return the step at which the decay ends."""
    return run.optim.decay_iters or run.trainer.steps


def rate(run: RunConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 1, of a resolved run."""
    o = run.optim
    highest = o.lr or 0.0
    lowest = o.min_lr or 0.0
    warmup = o.warmup_iters or 0
    end = end_of_decay(run)
    counted = step - 1 if o.schedule_counts == "past_updates" else step
    if warmup > 0 and counted <= warmup:
        return highest * counted / warmup
    if o.schedule == "constant":
        return highest
    if counted > end:
        return lowest
    if o.schedule == "inverse_sqrt":
        return max(lowest, highest * math.sqrt(max(warmup, 1) / max(counted, 1)))
    return lowest + _share(run, counted - warmup, end - warmup) * (highest - lowest)


def _share(run: RunConfig, step: int, steps: int) -> float:
    """Return the share of the rate after some steps of decay."""
    o = run.optim
    part = step / steps
    style: str = o.schedule
    if style == "wsd":
        last = o.wsd_decay_iters or 1
        if step <= steps - last:
            return 1.0
        part = (step - steps + last) / last
        style = o.wsd_decay_style
    shapes = {
        "linear": 1.0 - part,
        "cosine": 0.5 * (math.cos(math.pi * part) + 1.0),
        "exponential": 2.0 * math.pow(0.5, part) - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(part),
    }
    return shapes[style]


def goes_on_alike(run: RunConfig, other: RunConfig, step: int) -> bool:
    """Return whether the first `step` steps of `other`, which differs in length, have the rates of
    `run`.

    They do if the schedule is constant, if the decay has not begun, or if it ends at the same step.
    """
    ends = end_of_decay(other), end_of_decay(run)
    if run.optim.schedule == "constant" or ends[0] == ends[1]:
        return True
    unchanged = run.optim.warmup_iters or 0
    if run.optim.schedule == "inverse_sqrt":
        unchanged = min(ends)
    if run.optim.schedule == "wsd":
        unchanged = max(unchanged, min(ends) - (run.optim.wsd_decay_iters or 0))
    return step <= unchanged


def new_curve(run: RunConfig, other: RunConfig, step: int) -> str:
    """Describe how the learning rate changes if a run that made `step` steps gets another
    length.
    """
    end = end_of_decay(run)
    last = end_of_decay(other)
    return (
        f"its {run.optim.schedule} decay would end at step {end} in place of {last}, and the"
        f" learning rate would go from {rate(other, step):.3g} at step {step} to"
        f" {rate(run, step + 1):.3g} at step {step + 1} and {rate(run, end):.3g} at step {end}"
    )
