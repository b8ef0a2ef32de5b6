"""Which samples of a step make a micro-batch of which data-parallel rank, so that all ranks attend
equally much.
"""

from __future__ import annotations

import numpy as np


def by_work(works: np.ndarray, micro: int, ranks: int) -> np.ndarray:
    """Return places of the samples of a step [micro-batches, ranks, micro], all of them once, by
    what each takes.

    Those of about the same work are in the micro-batch that ranks run at the same time, and of
    those a rank gets the more the less it has so far. A function of `works` [samples] alone, so
    that every rank deals alike.
    """
    order = np.argsort(-works, kind="stable").reshape(-1, ranks * micro)
    loads = np.zeros(ranks)
    out = np.empty((len(order), ranks, micro), np.int64)
    for number, some in enumerate(order):
        held: list[list[int]] = [[] for _ in range(ranks)]
        sums = np.zeros(ranks)
        for place in some:
            free = [share for share in range(ranks) if len(held[share]) < micro]
            share = min(free, key=lambda one: (sums[one], one))
            held[share].append(int(place))
            sums[share] += works[place]
        heaviest = np.argsort(-sums, kind="stable")
        least = np.argsort(loads, kind="stable")
        for share, rank in zip(heaviest, least, strict=True):
            out[number, rank] = held[share]
            loads[rank] += sums[share]
    return out
