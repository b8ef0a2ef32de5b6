"""Bin packing: documents into windows by first fit, samples onto ranks by their work.

First fit puts each item into the first window so far that has room for it.
"""

from __future__ import annotations

import numpy as np


def first_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the items window by window, and the start of each window among them.

    `sizes` is int64 [n], each at most `capacity`; the results are int64 [n] and int64 [windows +
    1]. It takes n log n steps: each node of a tree holds the largest room of the windows below it.

    Raises:
        ValueError: an item is larger than a window.
    """
    count = len(sizes)
    if count and int(sizes.max()) > capacity:
        raise ValueError(f"an item of {sizes.max()} does not fit into {capacity}")
    # a list and not an array: single elements of a numpy array take many times as long
    leaves = 1 << max(0, count - 1).bit_length()
    room = [capacity] * (2 * leaves)
    window = np.empty(count, np.int64)
    for item, size in enumerate(sizes.tolist()):
        node = 1
        # to the left wherever there is room, so that the leaf is the first window that fits
        while node < leaves:
            node = 2 * node + (room[2 * node] < size)
        window[item] = node - leaves
        room[node] -= size
        node >>= 1
        while node:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node >>= 1
    order = np.argsort(window, kind="stable")
    used = int(window.max()) + 1 if count else 0
    return order, np.searchsorted(window[order], np.arange(used + 1))


def first_fits(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the window of each item for many groups at once, counted in its group.

    `sizes` is int [groups, n], each at most `capacity`; the result is int64 of the same shape. An
    item of size 0 opens no window.
    """
    groups, count = sizes.shape
    # every item is compared with the room of all groups, which int16 halves
    dtype = np.int16 if capacity <= np.iinfo(np.int16).max else np.int32
    room = np.full((groups, 16), capacity, dtype)
    window = np.empty((count, groups), np.int64)
    rows = np.arange(groups)
    opened = 1
    for item, size in enumerate(np.ascontiguousarray(sizes.T, dtype)):
        found = (room[:, :opened] >= size[:, None]).argmax(1)
        room[rows, found] -= size
        window[item] = found
        # the last open window stays empty in all groups
        if int(found.max()) == opened - 1:
            opened += 1
            if opened > room.shape[1]:
                room = np.concatenate([room, np.full_like(room, capacity)], axis=1)
    return np.ascontiguousarray(window.T)


def balance_by_work(works: np.ndarray, micro: int, ranks: int) -> np.ndarray:
    """Return the places of the samples of a step [micro-batches, ranks, micro], each once.

    Samples of similar work are in the micro-batches that ranks run at the same time, and the rank
    with the least work so far gets the most. The result depends only on `works` [samples], so every
    rank computes the same.
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
