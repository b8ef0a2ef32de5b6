"""Selection of tests: cases of samples and products beyond the needed ones are `full`, and `--part`
runs a part of them.
"""

from __future__ import annotations

import atexit
import gc
import os
import zlib
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.support.covering import Part, cover


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--part`."""
    parser.addoption(
        "--part", default="1/1", help="K/N: one of N parts of the cases; all N have each case once"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from the collected tests.

    Each of its full passes would look at a million objects that stay until the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else libraries report what is not freed at the end


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that samples and products do not need, then drop the cases of other parts.

    Raises:
        pytest.UsageError: `--part` is not K/N with K from 1 to N.
    """
    _mark_samples(items)
    _mark_products(items)
    try:
        part = Part.parse(config.getoption("--part"))
    except ArgumentTypeError as error:
        raise pytest.UsageError(f"--part {error}") from None
    others = [item for item in items if not part.has(zlib.crc32(item.nodeid.encode()))]
    if others:
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through every imported module again and again."""
    # with the defaults, a tenth to a half of a test's time goes to objects that never die
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _mark_samples(items: list[pytest.Item]) -> None:
    """Keep each third of the cases that are not `full` of a test marked `sampled`, or each n-th of
    one marked `sampled(n)`.
    """
    if os.environ.get("MTRAIN_TWO_ENGINES"):  # the other release runs no case that is full
        return
    seen: defaultdict[tuple[object, ...], int] = defaultdict(int)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if (
            marker is None
            or not isinstance(item, pytest.Function)
            or item.get_closest_marker("full")
            or item.get_closest_marker("engine")
        ):
            continue
        name = (item.path, item.cls, item.originalname)
        if seen[name] % (marker.args[0] if marker.args else 3):
            item.add_marker(pytest.mark.full)
        seen[name] += 1


def _mark_products(items: list[pytest.Item]) -> None:
    """Keep enough cases of a test marked `covering` for every pair of values, or of one marked
    `covering(1)` for every value.
    """
    cases = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("covering")
            and hasattr(item, "callspec")
        ):
            cases[item.path, item.cls, item.originalname].append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("covering")
        assert marker is not None
        values = [
            [(name, repr(value)) for name, value in item.callspec.params.items()] for item in same
        ]
        strength = min(marker.args[0] if marker.args else 2, len(values[0]))
        rows = [frozenset(combinations(row, strength)) for row in values]
        kept = set(cover(rows))
        for index, item in enumerate(same):
            if index not in kept:
                item.add_marker(pytest.mark.full)
