"""Samples of a step dealt out by work: all of them once, alike on every rank, and equally much for
each.
"""

from __future__ import annotations

import numpy as np
import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import check
from mtrain.data.batch import GlobalBatches, Packing, next_token_collator
from mtrain.data.samples.mock import MockSamples
from mtrain.data.samples.packing import balance_by_work
from tests.support.configs import LAPTOP

END = 7
LENGTH = 64
SIZE = 32


def _ranks(micro: int, ranks: int, *, balanced: bool) -> list[GlobalBatches]:
    form = next_token_collator(packing=Packing((END,)))
    source = MockSamples(LENGTH, 1, 20)
    return [
        GlobalBatches(source, SIZE, micro, rank, ranks, form, balanced=balanced)
        for rank in range(ranks)
    ]


def _works(micro: int, ranks: int, *, balanced: bool) -> np.ndarray:
    """Return the work of attention, [micro-batches, ranks]."""
    of_ranks = [one.microbatches(SIZE) for one in _ranks(micro, ranks, balanced=balanced)]
    return np.array(
        [[(b["cu_seqlens"].diff() ** 2).sum().item() for b in batches] for batches in of_ranks]
    ).T


@pytest.mark.parametrize(("micro", "ranks"), [(1, 4), (2, 4), (4, 2)])
def test_balance_each_sample_once_with_more_equal_work(micro: int, ranks: int) -> None:
    numbers = [one.numbers(SIZE) for one in _ranks(micro, ranks, balanced=True)]
    assert sorted(np.concatenate(numbers, axis=None)) == list(range(SIZE, 2 * SIZE))
    assert all(one.shape == (SIZE // (micro * ranks), micro) for one in numbers)
    dealt, in_turn = (_works(micro, ranks, balanced=b) for b in (True, False))
    assert dealt.sum() == in_turn.sum()
    assert _waits(dealt) < 0.5 * _waits(in_turn), "for the rank with the most, in each micro-batch"
    assert np.ptp(dealt.sum(0)) < 0.5 * np.ptp(in_turn.sum(0)), "and over the step"


def _waits(works: np.ndarray) -> float:
    return float((works.max(1) - works.mean(1)).sum())


def test_balance_step_is_independent_of_start_and_not_in_turn() -> None:
    later, early = (_ranks(2, 2, balanced=True)[1] for _ in range(2))
    for step in range(3):
        early.microbatches(step * SIZE)
    assert np.array_equal(early.numbers(2 * SIZE), later.numbers(2 * SIZE))
    assert not np.array_equal(later.numbers(0), _ranks(2, 2, balanced=False)[1].numbers(0))


def test_balance_least_loaded_rank_takes_work() -> None:
    assert balance_by_work(np.array([1.0, 8.0, 2.0, 4.0]), 1, 2).tolist() == [
        [[1], [3]],
        [[0], [2]],
    ]
    assert balance_by_work(np.array([5.0, 4.0, 3.0, 2.0]), 2, 2).tolist() == [[[0, 3], [1, 2]]]


def test_balance_key_needs_rank_bound_packed_samples() -> None:
    key = "data.packing_scheduler=dp_balanced"
    for words, code in (
        (f"parallel=dp2 data.packed=true {key}", ""),
        (f"parallel=dp2 {key}", "MT150"),
    ):
        run = resolve(compose(["data=mock", *words.split()]).run, LAPTOP)
        problems = [p for p in check(run) if p.severity == "error"]
        assert {p.code for p in problems} == ({code} if code else set())
