"""Batch sizes: the number of samples of each step, constant or ramped up."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mtrain.config.schema.run import RunConfig

# The largest number of sizes of a ramp; more are surely a slip.
MOST_STAGES = 1000

# Keys of `trainer` with which all steps have the same size.
NO_RAMP = {"rampup_batch_size": None, "batch_size_schedule": None}


class Stage(NamedTuple):
    """Consecutive steps of one size."""

    first: int
    """Samples consumed before the stage; a step takes the size of the stage in which it starts."""
    size: int
    """Samples per step."""


def stages(run: RunConfig) -> tuple[Stage, ...]:
    """Return the batch sizes of a run in order; of a ramp that the rules refuse, only the last."""
    t = run.trainer
    if t.rampup_batch_size is not None:
        return linear(t.rampup_batch_size, t.batch)
    listed = []
    begin = 0
    for size, tokens in t.batch_size_schedule or ():
        listed.append(Stage(begin, size))
        # Ramps are published in tokens, and a step reads whole samples: rounded up.
        begin = -(-tokens // run.data.length)
    return (*listed, Stage(begin, t.batch))


def linear(ramp: Sequence[int], last: int) -> tuple[Stage, ...]:
    """Return Megatron-LM's ramp `(first size, increment, samples)` up to `last`; only `last` if it
    has no whole steps.

    The increments are evenly spaced in samples. As in Megatron-LM, a quotient of floats decides
    which increment a step is in, so both make the same steps even where it is rounded.
    """
    first, increment, samples = ramp
    count, rest = divmod(last - first, increment)
    if rest or not 1 <= count <= MOST_STAGES:
        return (Stage(0, last),)
    # A float, as in Megatron-LM; the two loops below correct it by whole samples where float
    # division rounds across a boundary.
    each = samples / count
    out = [Stage(0, first)]
    for number in range(1, count + 1):
        begin = round(number * each)
        while begin and int((begin - 1) / each) >= number:
            begin -= 1
        while int(begin / each) < number:
            begin += 1
        out.append(Stage(min(begin, samples + 1), first + number * increment))
    return tuple(out)


def size_after(plan: Sequence[Stage], consumed: int) -> int:
    """Return the samples of the step that starts after `consumed` samples."""
    return plan[bisect_right([stage.first for stage in plan], consumed) - 1].size


def counted(plan: Sequence[Stage], steps: int) -> list[tuple[int, int]]:
    """Return (size, number of steps) of the first `steps` steps, without unused sizes."""
    out: list[tuple[int, int]] = []
    consumed = 0
    for i, stage in enumerate(plan):
        here = steps
        if i + 1 < len(plan):
            here = min(steps, -(-max(0, plan[i + 1].first - consumed) // stage.size))
        if here:
            out.append((here, stage.size))
        consumed = consumed + here * stage.size
        steps = steps - here
    return out


def samples_of(plan: Sequence[Stage], steps: int) -> int:
    """Return the samples that the first `steps` steps consume."""
    return sum(number * size for number, size in counted(plan, steps))


def steps_within(plan: Sequence[Stage], samples: int) -> int:
    """Return the largest number of steps that consume at most `samples`."""
    steps = 0
    consumed = 0
    for number, size in counted(plan, samples):
        here = min(number, (samples - consumed) // size)
        steps = steps + here
        consumed = consumed + here * size
        if here < number:
            break
    return steps


def asked(run: RunConfig) -> tuple[int, int, int]:
    """Return the train, validation and test samples that Megatron-LM requests for such a run."""
    t = run.trainer
    evaluations = t.steps // t.eval_interval + 1 if t.eval_interval else 1
    return (
        samples_of(stages(run), t.steps),
        evaluations * t.eval_iters * t.batch,
        t.eval_iters * t.batch,
    )
