"""First fit: each item goes into the first of the windows so far that has room for it."""

from __future__ import annotations

import numpy as np


def first_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Which items each window holds: the items window by window, and where each window begins among
    them.

    `sizes` int64 [n], each at most `capacity`; int64 [n] and int64 [windows + 1]. In n log n steps:
    a tree holds the largest room of any window below each of its nodes.

    Raises:
        ValueError: an item is larger than a window.
    """
    count = len(sizes)
    if count and int(sizes.max()) > capacity:
        raise ValueError(f"an item of {sizes.max()} does not fit into {capacity}")
    leaves = 1 << max(0, count - 1).bit_length()
    room = [capacity] * (2 * leaves)
    window = np.empty(count, np.int64)
    for item, size in enumerate(sizes.tolist()):
        node = 1
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
    """Return the same for many groups of items side by side: the window, counted in its group, of
    each item.

    `sizes` int [groups, n], each at most `capacity`; int64 of the same shape. An item of size 0
    opens no window.
    """
    groups, count = sizes.shape
    dtype = np.int16 if capacity <= np.iinfo(np.int16).max else np.int32
    room = np.full((groups, 16), capacity, dtype)
    window = np.empty((count, groups), np.int64)
    rows = np.arange(groups)
    opened = 1
    for item, size in enumerate(np.ascontiguousarray(sizes.T, dtype)):
        found = (room[:, :opened] >= size[:, None]).argmax(1)
        room[rows, found] -= size
        window[item] = found
        if (
            int(found.max()) == opened - 1
        ):  # one that is empty in all groups stays behind the others
            opened += 1
            if opened > room.shape[1]:
                room = np.concatenate([room, np.full_like(room, capacity)], axis=1)
    return np.ascontiguousarray(window.T)
