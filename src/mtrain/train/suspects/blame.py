"""Conclusions from two computations of the same step: pure functions of what ranks sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Sent = tuple[str, bool]
"""A tensor that a rank gave to a collective or to another rank, or got from it: the key that all
ranks of that communication have in common, and whether the bits that this rank gave differ between
the two computations.
"""


def roots(ranks: Sequence[Sequence[Sent]]) -> list[int]:
    """Return the places of the ranks whose own computation differs.

    Each rank has its communications in order. One that sends other bits although nothing that it
    received before depends on a difference is a root; ranks that differ only later have received
    the difference.
    """
    given: set[str] = {key for events in ranks for key, differs in events if differs}
    found = []
    for place, events in enumerate(ranks):
        first = next((differs for key, differs in events if key in given), False)
        if first:
            found.append(place)
    return found


@dataclass(frozen=True)
class Dispute:
    """Two ranks that computed the same samples with different results."""

    computer: int
    """The rank that computed the samples of `owner`, its neighbour in the data-parallel group."""
    owner: int
    computed: float
    """The largest magnitude in the first tensor that differs, as `computer` has it."""
    owned: float
    """The same as `owner` has it."""


def culprit(disputes: Sequence[Dispute], factor: float) -> int | None:
    """Return the rank that takes part in most disputes; between equals, the one whose results are
    more than `factor` times as large; None: neither rule names exactly one.
    """
    parts = Counter(rank for each in disputes for rank in (each.computer, each.owner))
    most = [rank for rank, count in parts.items() if count == max(parts.values())]
    if len(most) == 1:
        return most[0]
    larger = {rank for each in disputes for rank in _larger(each, factor)}
    return larger.pop() if len(larger) == 1 else None


def _larger(dispute: Dispute, factor: float) -> Iterator[int]:
    if dispute.computed > factor * dispute.owned:
        yield dispute.computer
    if dispute.owned > factor * dispute.computed:
        yield dispute.owner
