"""The data-parallel rank that owns work which only one of them has to do."""

from __future__ import annotations

from collections.abc import Sequence


def owners(works: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece of work: the one that takes the longest goes to the rank that
    has the least so far.
    """
    loads = [0] * ranks
    found = [0] * len(works)
    for place in sorted(
        range(len(works)), key=lambda i: -works[i]
    ):  # a stable order: the same on all
        found[place] = loads.index(min(loads))
        loads[found[place]] += works[place]
    return found
