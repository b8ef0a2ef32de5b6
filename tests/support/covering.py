"""Which cases of a table `make test` runs: as few as have every feature of it. `make test-all` runs the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Features = frozenset[Hashable]


def cover(features: Sequence[Features], costs: Sequence[float]) -> list[int]:
    """Indices of cases that together have every feature: again and again the one with most new ones for its cost."""
    missing: set[Hashable] = set().union(*features)
    chosen: list[int] = []
    while missing:
        chosen.append(max(range(len(features)), key=lambda i: len(features[i] & missing) / costs[i]))
        missing -= features[chosen[-1]]
    for index in list(chosen):
        others = [features[i] for i in chosen if i != index]
        if others and features[index] <= frozenset[Hashable]().union(*others):
            chosen.remove(index)
    return sorted(chosen)


def some(
    table: Mapping[str, Any] | Iterable[str],
    always: Iterable[str] = (),
    features: Callable[[Any], Features] | None = None,
) -> list[Any]:
    """The names of a table as parameters: `full` outside of `always` and, given `features`, of their cover."""
    names, kept = list(table), set(always)
    assert kept <= set(names), f"no such cases: {sorted(kept - set(names))}"
    if features is not None:
        assert isinstance(table, Mapping)
        rows = [features(value) for value in table.values()]
        kept |= {names[i] for i in cover(rows, [cost(row) for row in rows])}
    return [pytest.param(name, id=name, marks=() if name in kept else pytest.mark.full) for name in names]


def keys(values: Mapping[str, Any]) -> Features:
    """What keyword arguments ask for: each with its value, and those inside of them."""
    found: set[Hashable] = set()
    for key, value in values.items():
        found |= keys(value) if isinstance(value, Mapping) else {f"{key}={value}"}
    return frozenset(found)


def cost(features: Features) -> float:
    """About what a case costs: its ranks, and the one that it is compared with."""
    ranks = 1.0
    for feature in features:
        if match := re.fullmatch(r"(?:tp|pp|dp|cp)=?(\d+)", str(feature)):
            ranks *= int(match[1])
    return 1.0 + ranks
