"""The causes that slowed a run, each with the tokens per second that it cost.

The rate of a run is its tokens over the seconds of its life. A cause that took some of these
seconds cost the rate that the run would have had without them, minus the rate that it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from mtrain.goodput.account import Account
from mtrain.goodput.meter import (
    DOWN,
    EVALUATING,
    LOADING,
    QUEUED,
    RECOMPUTING,
    SAVING,
    STARTING,
    WAITING,
)
from mtrain.plan.compare import FIRST_STEPS, Row
from mtrain.report.folder import Record, curve, number
from mtrain.report.story import Story, slowest
from mtrain.units import bytes_

WORDS = {
    SAVING: "saves that blocked the loop",
    EVALUATING: "evaluations",
    RECOMPUTING: "steps that were made again",
    LOADING: "loading and compiling",
    STARTING: "starting",
    QUEUED: "in the queue",
    DOWN: "down between attempts",
}
PARTS = ("forward and backward", "optimizer")
GROWTH = 0.05
"""The least growth of step times, and of memory, from the beginning of the run to its last quarter
that counts.
"""
MEMORY = ("allocated_bytes", "host_rss_bytes")
"""Keys of a sample of memory that a leak makes grow."""
LEAST = 0.002
"""Causes of a smaller share of the time are left out."""


class Excess(NamedTuple):
    """The seconds that a cause took from all steps."""

    cause: str
    seconds: float
    source: str
    """The files and keys that they come from."""


@dataclass(frozen=True)
class Cost:
    """A cause, and its seconds."""

    cause: str
    seconds: float
    rate: float
    """Tokens per second that it cost."""
    source: str
    """See `Excess`."""


def costs(
    record: Record,
    story: Story,
    life: Account | None,
    compared: Sequence[Row],
    causes: Sequence[Excess],
) -> list[Cost]:
    """Return the causes by their cost, the largest first; they may overlap.

    `causes` are those of slow steps with their seconds.
    """
    stepping = sum(value for _, value in curve(record.steps, "step_s"))
    wall = max(stepping, life.wall_s if life is not None else 0.0)
    tokens = sum(_tokens(line) for line in record.steps.values())
    if not wall or not tokens:
        return []
    waits = sum(value for _, value in curve(record.steps, "data_wait_s"))
    slow = [*_of_steps(record, story), *causes]
    beyond = _of_plan(record, compared, sum(one.seconds for one in slow))
    waiting = Excess(WAITING.replace("_", " "), waits, "metrics.jsonl:data_wait_s:sum")
    return sorted(
        (
            Cost(cause, seconds, tokens / (wall - seconds) - tokens / wall, source)
            for cause, seconds, source in (*_of_life(life), waiting, *slow, *beyond)
            if LEAST * wall < seconds < wall
        ),
        key=lambda cost: -cost.rate,
    )


def _tokens(line: Mapping[str, object]) -> float:
    """Return the tokens of a step without padding, as its rate counts them."""
    rate = number(line.get("tokens_per_s"))
    seconds = number(line.get("step_s"))
    return rate * seconds if rate is not None and seconds is not None else 0.0


def _of_life(life: Account | None) -> list[Excess]:
    if life is None:
        return []
    spent = life.seconds
    return [Excess(words, spent[cause], f"life.jsonl:{cause}") for cause, words in WORDS.items()]


def _of_steps(record: Record, story: Story) -> Iterator[Excess]:
    slow = slowest(story)
    if slow is not None:
        # The reports that named it are about steps before.
        keys = None if record.config is None else record.config.resilience
        before = 1 if keys is None else (keys.straggler_interval or 1) * keys.straggler_reports
        first = min(one.step for one in story.slow) - before
        since = [step for step in record.steps if step > first]
        excess = max(0.0, slow.own_s - slow.usual_s)
        slower = slow.own_s / max(slow.usual_s, 1e-9)
        words = f"rank {slow.rank} on {slow.machine}, {slower:.1f} x its stage"
        since_words = f"{words}, since step {min(since, default=0)}"
        yield Excess(since_words, excess * len(since), "events:straggler:excess")
    times = [value for _, value in curve(record.steps, "step_s")][FIRST_STEPS:]
    quarter = len(times) // 4
    if quarter >= FIRST_STEPS:
        early = _beginning(times)
        if median(times[-quarter:]) > (1 + GROWTH) * early:
            words = f"steps that became slower{grown(story)}"
            excess = sum(max(0.0, time - early) for time in times)
            yield Excess(words, excess, "events:memory:growth metrics.jsonl:step_s:slower")


def _beginning(times: Sequence[float]) -> float:
    """Return the time of a step at the beginning of a run, without its `FIRST_STEPS` steps."""
    some = max(FIRST_STEPS, len(times) // 10)
    first = median(times[:some])
    second = median(times[some : 2 * some])
    # Steps that become slower from the first one on were faster before the middle of these.
    rise = max(0.0, second - first) / some
    return max(first / 2, first - rise * (FIRST_STEPS + some / 2))


def grown(story: Story) -> str:
    """Return the memory that grew all the time, as the end of a sentence; empty: none did."""
    for key in MEMORY:
        values = [size for _, size in story.memory.get(key, ())]
        quarter = len(values) // 4
        if not quarter:
            continue
        # What starts is warm after the first quarter; a leak never stops.
        parts = [median(values[place * quarter : (place + 1) * quarter]) for place in range(1, 4)]
        last = values[-1]
        if parts[0] < parts[1] < parts[2] and last > (1 + GROWTH) * parts[0]:
            kind = key.removesuffix("_bytes").replace("_", " ")
            rank = story.fullest[key]
            return (
                f" while memory grew: {kind} of rank {rank}, {bytes_(parts[0])} to {bytes_(last)}"
            )
    return ""


def _of_plan(record: Record, compared: Sequence[Row], known: float) -> Iterator[Excess]:
    """Yield the parts that were slower than planned, beyond what other causes explain of it."""
    for row in compared:
        if row.part in PARTS and row.planned and row.measured and row.measured > row.planned:
            excess = (row.measured - row.planned) * len(record.steps)
            beyond = max(0.0, excess - known)
            known = max(0.0, known - excess)
            key = f"{row.part.replace(' and ', '_')}_s"
            source = f"plan.json:planned.{key}:beyond metrics.jsonl:{key}"
            yield Excess(f"{row.part}, slower than planned", beyond, source)
