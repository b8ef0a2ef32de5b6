"""Marks as `full` what of a product of parameters `make test` does without; tests and kernels/tests share this."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest

from tests.support.covering import cover


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `covering` keeps cases enough for every pair of values; with `covering(1)`, for every value."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") and hasattr(item, "callspec"):
            cases[item.path, item.cls, item.originalname].append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("covering")
        assert marker is not None
        values = [[(name, repr(value)) for name, value in item.callspec.params.items()] for item in same]
        strength = min(marker.args[0] if marker.args else 2, len(values[0]))
        rows = [frozenset(combinations(row, strength)) for row in values]
        kept = set(cover(rows))
        for index, item in enumerate(same):
            if index not in kept:
                item.add_marker(pytest.mark.full)
