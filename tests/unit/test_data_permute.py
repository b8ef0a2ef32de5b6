"""The computed order of samples."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.data.permute import ROUNDS, Permutation, keys


def order(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return Permutation(n, keys(seed, epoch, "test", ROUNDS))(np.arange(n))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
@example(1, 0, 0)
@example(2, 0, 0)
@example(4, 0, 0)
@example(5, 0, 0)
@example(2053, 1, 1)
@example(4096, 1, 1)
@example(4097, 1, 1)
def test_permute_each_number_comes_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**31 - 1, 10**12 + 39, 2**62])
def test_permute_huge_domain_is_cheap_without_collisions(n: int) -> None:
    index = np.arange(20_000) * (n // 20_000)
    image = Permutation(n, keys(1, 2, "test", ROUNDS))(index)
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == len(index)


def test_permute_epochs_and_seeds_are_unrelated() -> None:
    orders = [order(5000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(5000))[0, 1]) < 0.06
        for b in orders[:i]:
            assert (a == b).sum() < 10


def test_permute_small_orders_are_near_uniform() -> None:
    first = np.bincount([order(5, seed)[0] for seed in range(2000)], minlength=5)
    assert first.min() > 300
    assert first.max() < 500


def test_permute_order_is_stable_across_versions() -> None:
    assert order(12, seed=1234, epoch=3).tolist() == [9, 8, 10, 5, 7, 3, 11, 2, 1, 4, 6, 0]


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_permute_outside_size_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="2\\^62"):
        Permutation(n, keys(0, 0, "test", ROUNDS))
