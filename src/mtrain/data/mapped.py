"""A file in a memory map, of which little is read where little is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mtrain.errors import CorruptData

AT_ONCE = 128 << 10
"""Bytes that Linux reads ahead when asked to, on a disk that is set to no more."""


class Mapped:
    """The bytes of a file; an empty file has none.

    Raises CorruptData for one that cannot be read.
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
        """Places are read far from each other from now on: no megabytes around each, which disks
        are set to read.
        """
        if self._map is not None and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
            self._scattered = True

    def expect(self, starts: Iterable[int], size: int) -> None:
        """Have the disk begin to read so many bytes at some places, where they are scattered."""
        if self._map is None or not self._scattered:
            return
        for start in starts:
            first = start - start % mmap.PAGESIZE
            stop = min(start + size, len(self.bytes))
            for at in range(first, stop, AT_ONCE):
                self._map.madvise(mmap.MADV_WILLNEED, at, min(AT_ONCE, stop - at))
