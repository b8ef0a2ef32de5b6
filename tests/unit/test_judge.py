"""An output is abnormal by healthy ones of the same module, and only if its input is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mtrain.train.suspects.judge import (
    FACTOR,
    FORWARD,
    NOT_FINITE,
    SIGN,
    Event,
    Healthy,
    facts,
    first_of,
)

MICRO_BATCHES = 4


def step_of(size: float, draw: random.Random, agreement: float = 0.9) -> list[Event]:
    """Return the outputs of two modules in the micro-batches of a step; that of the second, `mlp`,
    is `size` times its input.
    """
    events = []
    for number in range(MICRO_BATCHES):
        for order, (name, gain) in enumerate([("norm", 1.0), ("mlp", size)]):
            event = Event(name, FORWARD, number, "output 0", (0, order))
            event.output = {"not_finite": 0, "rms": gain * draw.uniform(0.8, 1.2), "shape": [8, 4]}
            event.input = {"not_finite": 0, "rms": 1.0}
            event.agreement = agreement + draw.uniform(-0.05, 0.05)
            event.predicted = draw.uniform(0.8, 1.0)
            events.append(event)
    return events


def wrong(event: Event, kind: str) -> None:
    """Put a fault into an event."""
    if kind == NOT_FINITE:
        event.output["not_finite"] = 3
    elif kind == SIGN:
        event.agreement = -(event.agreement or 0.0)
        event.scaling = (-event.scaling[0], event.scaling[1]) if event.scaling else None
    else:
        event.output["rms"] *= 100
        event.predicted /= 100
        event.scaling = (event.scaling[0], event.scaling[1] / 100) if event.scaling else None


@pytest.mark.parametrize("kind", [NOT_FINITE, FACTOR, SIGN])
@pytest.mark.parametrize(("agreement", "scales"), [(0.9, False), (0.35, False), (0.1, True)])
def test_judge_fault_of_one_micro_batch_is_found(kind: str, agreement: float, scales: bool) -> None:
    draw = random.Random(1)
    healthy = Healthy()
    steps = [step_of(0.1, draw, agreement) for _ in range(4)]
    for event in (event for step in steps for event in step):
        event.scaling = (draw.uniform(0.9, 1.0), draw.uniform(0.4, 0.5)) if scales else None
    for step in steps[:3]:
        healthy.learn(step)
    events = steps[3]
    assert healthy.first_abnormal(events) is None
    wrong(events[5], kind)
    # a later one has received it
    if kind == NOT_FINITE:
        events[7].input["not_finite"] = events[7].output["not_finite"] = 1
    found = healthy.first_abnormal(events)
    assert found is not None
    assert (found.event.order, found.event.micro_batch, found.kind) == ((0, 1), 2, kind)


def test_judge_growth_of_all_micro_batches_is_healthy() -> None:
    draw = random.Random(2)
    healthy = Healthy()
    for _ in range(3):
        healthy.learn(step_of(0.001, draw))
    # twenty times as large as in healthy steps, and what it is made of is, too
    assert healthy.first_abnormal(step_of(0.02, draw)) is None


def test_judge_first_of_ranks_is_worst_of_one_place() -> None:
    draw = random.Random(3)
    healthy = Healthy()
    for _ in range(3):
        healthy.learn(step_of(0.1, draw))
    told: list[dict[str, Any] | None] = [None]
    for rank, factor in ((1, 20.0), (2, 100.0)):
        events = step_of(0.1, draw)
        events[3].output["rms"] *= factor
        events[3].predicted /= factor
        found = healthy.first_abnormal(events)
        assert found is not None
        told.append(facts(found, rank))
    first = first_of(told)
    assert first is not None
    assert (first["rank"], first["micro_batch"], first["module"]) == (2, 1, "mlp")
    assert first_of([None]) is None
