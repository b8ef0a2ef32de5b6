"""The learning rate of each update, by schedule, against its formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs import tiny_run

LR, MIN, WARMUP, STEPS = 1.0, 0.1, 4, 20


def rates(**optim: Any) -> list[float]:
    """Rates of the updates 1 to STEPS."""
    from mtrain.build.optim import build_schedule

    run = tiny_run(optim={"lr": LR, "min_lr": MIN, "warmup_iters": WARMUP, **optim}, trainer={"train_iters": STEPS})
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    schedule = build_schedule(run, optimizer)
    found = []
    for _ in range(STEPS):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def share(step: int) -> float:
    """How much of the decay is over at an update."""
    return (step - WARMUP) / (STEPS - WARMUP)


FORMULAS = {
    "constant": lambda step: LR,
    "linear": lambda step: MIN + (LR - MIN) * (1 - share(step)),
    "cosine": lambda step: MIN + (LR - MIN) * (1 + math.cos(math.pi * share(step))) / 2,
    "inverse_sqrt": lambda step: max(MIN, LR * math.sqrt(WARMUP / step)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_warms_up_and_follows_its_formula(name: str) -> None:
    found = rates(schedule=name)
    assert found[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(1, WARMUP + 1)])
    assert found[WARMUP:] == pytest.approx([FORMULAS[name](step) for step in range(WARMUP + 1, STEPS + 1)])


def test_wsd_stays_and_then_decays() -> None:
    found = rates(schedule="wsd", wsd_decay_iters=5)
    assert found[WARMUP - 1 : STEPS - 5] == pytest.approx([LR] * (STEPS - 5 - WARMUP + 1))
    assert found[STEPS - 5 :] == pytest.approx([LR - (LR - MIN) * i / 5 for i in range(1, 6)])


def test_the_decay_may_end_before_the_run() -> None:
    found = rates(schedule="linear", decay_iters=10)
    assert found[9:] == pytest.approx([MIN] * (STEPS - 9))
    assert found[8] > MIN
