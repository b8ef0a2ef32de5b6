"""The smallest set that still triggers is found by halving."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtrain.train.suspects.halving import smallest


@pytest.mark.parametrize("wanted", [[0], [5], [11], [2, 9], [3, 4], [0, 5, 11]])
def test_halving_smallest_set_is_found(wanted: list[int]) -> None:
    tests = 0

    def triggers(part: Sequence[int]) -> bool:
        nonlocal tests
        tests += 1
        return set(wanted) <= set(part)

    assert smallest(range(12), triggers) == wanted
    # one of twelve: two halves in each of four rounds
    assert tests <= (8 if len(wanted) == 1 else 80)
