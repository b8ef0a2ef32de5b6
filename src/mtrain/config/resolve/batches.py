"""How many samples each step takes: all the same number, or fewer at first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mtrain.config.schema.run import RunConfig

MOST_STAGES = 1000
"""Sizes that a ramp may have; more of them are a slip of the pen."""

NO_RAMP = {"rampup_batch_size": None, "batch_size_schedule": None}
"""Keys of `trainer` with which all steps have the same size."""


class Stage(NamedTuple):
    """Steps of one size."""

    first: int
    """Samples that are consumed when it begins; a step takes the size of the stage that it begins
    in.
    """
    size: int
    """Samples per step."""


def stages(run: RunConfig) -> tuple[Stage, ...]:
    """Return the sizes of a run in their order; of what the rules refuse, the last one alone."""
    t = run.trainer
    if t.rampup_batch_size is not None:
        return linear(t.rampup_batch_size, t.batch)
    listed = []
    begin = 0
    for size, tokens in t.batch_size_schedule or ():
        listed.append(Stage(begin, size))
        begin = -(-tokens // run.data.length)
    return (*listed, Stage(begin, t.batch))


def linear(ramp: Sequence[int], last: int) -> tuple[Stage, ...]:
    """Megatron-LM's ramp `(first size, increment, samples)` up to `last`; where it has no whole
    steps, `last` alone.

    The increments lie evenly in the samples. As there, a quotient of floating-point numbers decides
    which of them a step is in, so that both make the same steps also where it is rounded.
    """
    first, increment, samples = ramp
    count, rest = divmod(last - first, increment)
    if rest or not 1 <= count <= MOST_STAGES:
        return (Stage(0, last),)
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
    """Return samples of the step that begins when `consumed` samples are used."""
    return plan[bisect_right([stage.first for stage in plan], consumed) - 1].size


def counted(plan: Sequence[Stage], steps: int) -> list[tuple[int, int]]:
    """Return how many steps of which size the first `steps` are; none of a size that is passed
    over.
    """
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
    """Return samples that the first `steps` steps take."""
    return sum(number * size for number, size in counted(plan, steps))


def steps_within(plan: Sequence[Stage], samples: int) -> int:
    """Return the most steps that take no more than `samples`."""
    steps = consumed = 0
    for number, size in counted(plan, samples):
        here = min(number, (samples - consumed) // size)
        steps = steps + here
        consumed = consumed + here * size
        if here < number:
            break
    return steps


def asked(run: RunConfig) -> tuple[int, int, int]:
    """Return samples of train, validation and test that Megatron-LM asks of its data for such a
    run.
    """
    t = run.trainer
    evaluations = t.steps // t.eval_interval + 1 if t.eval_interval else 1
    return (
        samples_of(stages(run), t.steps),
        evaluations * t.eval_iters * t.batch,
        t.eval_iters * t.batch,
    )
