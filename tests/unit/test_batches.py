"""Steps that grow: which sizes there are, when, and that every sample is read once whatever they
are.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mtrain.config.resolve.batches import (
    Stage,
    counted,
    linear,
    samples_of,
    size_after,
    stages,
    steps_within,
)
from mtrain.config.resolve.resolution import resolve
from mtrain.data.batch import GlobalBatches
from tests.support.configs import LAPTOP, tiny


class Nothing:
    """Samples that nobody reads."""

    def __len__(self) -> int:
        return 10**9

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        raise AssertionError


def walked(plan: tuple[Stage, ...], steps: int) -> list[int]:
    """Return the size of each step, in order."""
    sizes: list[int] = []
    for _ in range(steps):
        sizes.append(size_after(plan, sum(sizes)))
    return sizes


RAMPS = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.integers(1, 300)
).map(lambda r: linear((r[0], r[1], r[3]), r[0] + r[1] * r[2]))


@given(plan=RAMPS, steps=st.integers(0, 120))
def test_batches_stage_counts_equal_walk(plan: tuple[Stage, ...], steps: int) -> None:
    sizes = walked(plan, steps)
    assert [size for number, size in counted(plan, steps) for _ in range(number)] == sizes
    assert samples_of(plan, steps) == sum(sizes)
    assert steps_within(plan, sum(sizes)) == steps
    assert steps_within(plan, sum(sizes) + size_after(plan, sum(sizes)) - 1) == steps


@given(plan=RAMPS, dp=st.integers(1, 3), steps=st.integers(1, 40))
def test_batches_read_every_sample_once_in_order(
    plan: tuple[Stage, ...], dp: int, steps: int
) -> None:
    plan = tuple(Stage(stage.first, stage.size * dp) for stage in plan)
    ranks = [GlobalBatches(Nothing(), plan[-1].size, 1, rank, dp) for rank in range(dp)]
    read = []
    consumed = 0
    for size in walked(plan, steps):
        step = np.concatenate([r.numbers(consumed, size).ravel() for r in ranks])
        read += sorted(step.tolist())
        consumed += size
    assert read == list(range(consumed))


def test_batches_indivisible_step_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 6 samples is not a multiple of 4"):
        GlobalBatches(Nothing(), 8, 2, 0, 2).numbers(0, 6)


def test_batches_gpt3_ramp_counts_tokens() -> None:
    raw = tiny(trainer__batch_size_schedule=[[4, 2000], [8, 4000]], data__seq_length=128)
    plan = stages(resolve(raw, LAPTOP))
    assert plan == (Stage(0, 4), Stage(16, 8), Stage(32, 16))
    assert counted(plan, 10) == [(4, 4), (2, 8), (4, 16)]


def test_batches_stage_shorter_than_step_is_skipped() -> None:
    plan = (Stage(0, 10), Stage(3, 12), Stage(5, 20))
    assert counted(plan, 3) == [(1, 10), (2, 20)]
    assert walked(plan, 3) == [10, 20, 20]


@pytest.mark.parametrize(
    ("keys", "micro"),
    [
        ({"trainer__rampup_batch_size": [2, 2, 100]}, 2),
        ({"trainer__batch_size_schedule": [[6, 1000]]}, 2),
        ({"trainer__batch_size_schedule": [[24, 1000]]}, 8),
        ({"trainer__batch_size_schedule": [[8, 1000]], "parallel__pp": 4}, 2),
    ],
)
def test_batches_micro_batch_divides_every_step(keys: dict[str, Any], micro: int) -> None:
    run = resolve(tiny(**keys, trainer__micro_batch_size=None), LAPTOP)
    assert run.trainer.micro_batch_size == micro
