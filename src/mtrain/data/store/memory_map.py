"""A memory-mapped file with control over readahead."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mtrain.errors import CorruptData

AT_ONCE = 128 << 10
"""Bytes that one MADV_WILLNEED makes Linux read, on a disk with its default readahead."""


class MemoryMap:
    """The bytes of a file, which may be empty.

    Raises CorruptData for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._scattered = False
        try:
            with open(path, "rb") as file:
                if path.stat().st_size:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptData(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        self.bytes = np.frombuffer(self._map or b"", np.uint8)

    def scatter(self) -> None:
        """Turn readahead off, which would read megabytes around each place of a random read."""
        if self._map is not None and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
            self._scattered = True

    def expect(self, starts: Iterable[int], size: int) -> None:
        """Start to read `size` bytes at some places from the disk, if readahead is off."""
        if self._map is None or not self._scattered:
            return
        for start in starts:
            first = start - start % mmap.PAGESIZE
            stop = min(start + size, len(self.bytes))
            for at in range(first, stop, AT_ONCE):
                self._map.madvise(mmap.MADV_WILLNEED, at, min(AT_ONCE, stop - at))
