"""The lines of a JSON Lines file by number, with their places for messages."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.errors import CorruptData


class JsonLines:
    """The lines of a file that are not blank; `len` counts them.

    A line is read on demand.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            self._bytes: Any = (
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            )
        starts = []
        numbers = []
        at = 0
        line = 0
        while at < size:
            end = self._bytes.find(b"\n", at)
            line = line + 1
            end = size if end < 0 else end
            if self._bytes[at:end].strip():
                starts.append(at)
                numbers.append(line)
            at = end + 1
        self._starts = np.array(starts, np.int64)
        self.numbers = np.array(numbers, np.int64)
        """The line of each record, from 1; int64 [records]."""

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, number: int) -> bytes:
        """Return the bytes of a record."""
        start = int(self._starts[number])
        end = self._bytes.find(b"\n", start)
        return bytes(self._bytes[start : end if end >= 0 else None])

    def named(self, number: int) -> Named:
        """Return a context that adds the place of a record to a CorruptData."""
        return Named(self, number)

    def place(self, number: int) -> str:
        """Return file and line of a record."""
        return f"{self.file}:{self.numbers[number]}"


class Named:
    """A context that puts the place of a record in front of an error."""

    def __init__(self, owner: JsonLines, number: int) -> None:
        self.owner = owner
        self.number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CorruptData):
            raise CorruptData(f"{self.owner.place(self.number)}: {error}") from None
