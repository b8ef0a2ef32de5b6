"""Host memory that a rank and its writer share: a ring of bytes, and a few counters.

Needs no torch. The memory has no name, so the kernel frees it when the last of the two processes
ends, however it ends.

The rank copies bytes into the ring in parts, each in one run of memory, and sends the place of each
part to the writer. The writer handles parts in the same order and moves `freed` behind each. A ring
that is as large as a save never waits for the writer; a smaller one holds a part of the save at a
time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Self

PAGE = 4096
"""The counters take the first page, so that the ring begins at one."""
PART_BYTES = 4 << 20
"""The most bytes of a part: a multiple of what is hashed together."""
SMALLEST = 4 * PART_BYTES
"""The least size of a ring: one part is written while the next ones are copied."""

FREED = 0
"""Counter: bytes of the ring that the writer has handled since the save began."""
TICKS = 1
"""Counter: signs of life of the writer."""
PHASE = 2
"""Counter: what the writer does, one of the numbers below."""
WRITTEN = 3
"""Counter: bytes of the save that the writer has given to the disk."""

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
        self._page = mmap.mmap(descriptor, PAGE)
        self.counters = memoryview(self._page).cast("Q")
        self.capacity = 0
        self.ring: mmap.mmap | None = None
        self._end = 0
        """Position behind the last part; positions count on where the ring begins again."""

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
        self._end = 0
        self.counters[FREED] = 0
        self.counters[WRITTEN] = 0

    def place(self, nbytes: int) -> int:
        """Return the position of the next part, which does not run over the ring's end."""
        at = self._end
        if at % self.capacity + nbytes > self.capacity:
            at += self.capacity - at % self.capacity
        self._end = at + nbytes
        return at

    def has_room(self, end: int) -> bool:
        """Return whether the ring is free up to a position."""
        return end - self.counters[FREED] <= self.capacity

    def close(self) -> None:
        """Give the descriptor back; the memory stays until nobody maps it."""
        os.close(self.descriptor)


def capacity_for(nbytes: int, limit: int | None) -> int:
    """Return the size of a ring for a save of `nbytes`: of at most `limit` bytes, if that is given
    and not too small to work with.
    """
    wanted = nbytes if limit is None else min(nbytes, limit)
    return -(-max(wanted, SMALLEST) // PAGE) * PAGE
