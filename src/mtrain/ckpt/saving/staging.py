"""Host memory that a rank and its writer share: a ring of bytes, and a few counters.

Needs no torch. The memory has no name, so the kernel frees it when the last of the two processes
ends, however it ends.

The bytes of a save have positions, which count on where the ring begins again. A position and the
offset in the file have the same place in a page, so the writer writes from the ring without a copy,
past the page cache too. The rank copies bytes in order and tells the writer up to which position;
the writer moves `freed` behind the bytes that it has written. A ring that is as large as a save
never waits for the writer; a smaller one holds a part of the save at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Self

from mtrain.ckpt.new_file import PAGE

PART_BYTES = 4 << 20
"""The most bytes of a part, which is copied when the ring has room for all of it."""
SMALLEST = 4 * PART_BYTES
"""The least size of a ring: of its quarters one is written, one hashed, and two are copied to."""

FREED = 0
"""Counter: the position up to which the writer has written."""
TICKS = 1
"""Counter: signs of life of the writer."""
PHASE = 2
"""Counter: the writer's activity, one of the numbers below."""

IDLE = 0
WORKING = 1
ON_DISK = 2
"""Inside a call to the disk, which may take long."""
FOR_RANK = 3
"""Waiting for bytes of its own rank."""


class Staging:
    """The shared memory, in either process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # the counters take the first page, so that the ring begins at one
        self._page = mmap.mmap(descriptor, PAGE)
        self.counters = memoryview(self._page).cast("Q")
        self.capacity = 0
        self.ring: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self:
        """Return new memory without a ring."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("mtrain-checkpoint", os.MFD_CLOEXEC)
        else:  # not Linux
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, PAGE)
        return cls(descriptor)

    def resize(self, capacity: int) -> None:
        """Make the ring hold `capacity` bytes, a multiple of `PAGE`, while no save is under way.

        Raises:
            OSError: there is not so much memory.
        """
        self.ring = None
        os.ftruncate(self.descriptor, PAGE + capacity)
        # All of it now: a page that is missing later would end this process by a signal.
        os.posix_fallocate(self.descriptor, 0, PAGE + capacity)
        self.open(capacity)

    def open(self, capacity: int) -> memoryview:
        """Return the memory of a ring that `resize` made."""
        if self.ring is None or capacity != self.capacity:
            self.ring = mmap.mmap(self.descriptor, capacity, offset=PAGE)
            self.capacity = capacity
        return memoryview(self.ring)

    def begin(self) -> None:
        """Begin a save: the ring is empty."""
        self.counters[FREED] = 0

    def has_room(self, end: int) -> bool:
        """Return whether the ring is free up to a position."""
        return end - self.counters[FREED] <= self.capacity

    def close(self) -> None:
        """Give the descriptor back; the memory stays until nobody maps it."""
        os.close(self.descriptor)


def capacity_for(nbytes: int, limit: int | None) -> int:
    """Return the size of a ring for a save of `nbytes`: at most a usable `limit`."""
    wanted = nbytes if limit is None else min(nbytes, limit)
    return next_page(max(wanted, SMALLEST))


def next_page(position: int) -> int:
    """Return the first position of a page that is not before `position`."""
    return -(-position // PAGE) * PAGE
