"""The smallest set of items that still triggers something, by halving: a pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def smallest(items: Sequence[T], triggers: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of `items` that triggers and from which nothing can be left out, in order.

    `items` as a whole triggers. This is the algorithm ddmin of Zeller and Hildebrandt (Simplifying
    and Isolating Failure-Inducing Input, 2002): of one item among n it needs about 2 log2(n) tests.
    """
    kept = list(items)
    parts = 2
    while len(kept) > 1:
        cuts = _cut(kept, parts)
        rests = [[one for one in kept if one not in cut] for cut in cuts] if parts > 2 else []
        found = next((part for part in (*cuts, *rests) if triggers(part)), None)
        if found is not None:
            parts = 2 if len(found) <= len(kept) / parts + 1 else max(2, parts - 1)
            kept = found
        elif parts >= len(kept):
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept


def _cut(items: list[T], parts: int) -> list[list[T]]:
    """Return consecutive parts whose sizes differ by one at most."""
    bounds = [round(i * len(items) / parts) for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]
