"""The difference between the wall clocks of ranks, measured over the store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

ROUNDS = 8
"""Questions of each rank; the answer that came fastest counts."""
WITHIN = timedelta(seconds=10)
"""The wait for an answer, after which the difference stays unknown."""


def now_ns() -> int:
    """Return this machine's wall clock in nanoseconds."""
    return time.time_ns()


def offset_ns(
    store: dist.Store, rank: int, ranks: Iterable[int], name: str
) -> tuple[int, int] | None:
    """Return the nanoseconds to add to this rank's wall clock to get that of rank 0, and how far
    off that may be; None: no answer came.

    Rank 0 answers, and `ranks` ask one after the other; both call it with the same `name`, which
    was not used before.
    """
    asking = sorted(set(ranks) - {0})
    try:
        if rank == 0:
            for other in asking:
                _answer(store, f"{name}/{other}")
            return 0, 0
        return _ask(store, f"{name}/{rank}")
    except RuntimeError:  # torch's error of a store: the other rank is late or gone
        return None


def _answer(store: dist.Store, name: str) -> None:
    for number in range(ROUNDS):
        store.wait([f"{name}/ask/{number}"], WITHIN)
        store.set(f"{name}/answer/{number}", str(now_ns()))


def _ask(store: dist.Store, name: str) -> tuple[int, int]:
    found = []
    for number in range(ROUNDS):
        # The first question also waits until rank 0 turns to this rank: it takes longest.
        begun = now_ns()
        store.set(f"{name}/ask/{number}", "")
        store.wait([f"{name}/answer/{number}"], WITHIN)
        there = int(store.get(f"{name}/answer/{number}"))
        ended = now_ns()
        found.append((ended - begun, there - (begun + ended) // 2))
    took, offset = min(found)
    return offset, took // 2
