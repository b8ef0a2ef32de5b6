"""The check of an `.idx`: all of it at once, or of a large one its ends and some parts at first.

An index of 1e8 documents has 2 GB, of which a run reads a few places; the rest is checked part by
part while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mtrain.config.disk.token_files import HEADER
from mtrain.data.store.memory_map import MemoryMap
from mtrain.errors import CorruptData

CHUNK = 1 << 17
LONG = 1 << 23
"""Numbers that justify one more thread."""
LARGE = 1 << 22
"""Most sequences and documents of an index that is checked at once: 84 MB."""
PARTS = 32
PART = 1 << 10
"""Number of parts of a larger index that are checked at open, and their sequences and documents."""
STEP = 1 << 18
"""Sequences and documents of a larger index that are checked with each step of the run."""


class IndexCheck:
    """The check of an index; raises CorruptData with file and offset."""

    def __init__(
        self,
        path: Path,
        file: MemoryMap,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        itemsize: int,
    ) -> None:
        """Take the lengths, pointers and document indices of the file as `arrays`."""
        self._path = path
        self._file = file
        self._itemsize = itemsize
        self._lengths, self._pointers, self._documents = lengths, _, documents = arrays
        self._size = max(len(lengths), len(documents) - 1)
        self._next = 0

    def opened(self, *, whole: bool) -> int:
        """Check the index, or only its ends and some parts if it is large; return the size that the
        `.bin` must have.
        """
        if whole or self._size <= LARGE:
            self._look([range(self._size)])
            self._next = self._size
        else:
            last = self._size - PART
            self._look(
                [
                    range(last * i // (PARTS - 1), last * i // (PARTS - 1) + PART)
                    for i in range(PARTS)
                ]
            )
        if len(self._lengths):
            return int(self._pointers[-1]) + int(self._lengths[-1]) * self._itemsize
        return 0

    def look_on(self) -> None:
        """Check the next part of a large index."""
        if self._next < self._size:
            self._look([range(self._next, min(self._next + STEP, self._size))])
            self._next += STEP

    def look_at(self, documents: range) -> None:
        """Check some consecutive documents and their sequences."""
        if self._next < self._size:
            _check_documents(self._path, self._documents, len(self._lengths), [documents])
            held = range(self.sequence(documents.start), self.sequence(documents.stop))
            if held:
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [held])

    def sequence(self, document: int) -> int:
        """Return the first sequence of a document."""
        sequence = int(self._documents[document])
        count = len(self._lengths)
        if self._next < self._size:
            if not 0 <= sequence <= count:
                raise CorruptData(
                    f"{self._path}: offset {HEADER.size + 12 * count + 8 * document}: document"
                    f" index {document} is {sequence}, and there are {count} sequences"
                )
            around = range(max(0, sequence - 1), min(sequence + 1, count))
            if around:
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [around])
        return sequence

    def _look(self, parts: list[range]) -> None:
        count = len(self._lengths)
        documents = len(self._documents) - 1
        for at, size in (
            (HEADER.size, 4),
            (HEADER.size + 4 * count, 8),
            (HEADER.size + 12 * count, 8),
        ):
            for part in parts:
                self._file.expect([at + size * part.start], size * len(part))
        if count:
            _check_pointers(
                self._path, self._lengths, self._pointers, self._itemsize, _within(parts, count)
            )
        _check_documents(self._path, self._documents, count, _within(parts, documents))


def _within(parts: list[range], count: int) -> list[range]:
    """Return ranges without their places from `count` on."""
    return [range(min(part.start, count), min(part.stop, count)) for part in parts]


def _check_pointers(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, parts: list[range]
) -> None:
    """Refuse negative lengths and pointers that are not the running sum."""

    def wrong(first: int, stop: int) -> int | None:
        """Return the start of the first chunk with a wrong length or pointer."""
        bytes_ = np.empty(CHUNK, np.int64)
        steps = np.empty(CHUNK, np.int64)
        differ = np.empty(CHUNK, np.bool_)
        for at in range(first, stop, CHUNK):
            here = lengths[at : min(at + CHUNK, stop)]
            if here.min() < 0:
                return at
            ahead = pointers[at + 1 : at + len(here) + 1]  # one less at the end of all
            n = len(ahead)
            np.multiply(here[:n], itemsize, out=bytes_[:n], dtype=np.int64)
            np.subtract(ahead, pointers[at : at + n], out=steps[:n])
            if np.not_equal(steps[:n], bytes_[:n], out=differ[:n]).any():
                return at
        return None

    at = 0 if pointers[0] != 0 else _first(wrong, parts)
    if at is not None:
        raise _wrong_pointer(path, lengths, pointers, itemsize, at)


def _wrong_pointer(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, at: int
) -> CorruptData:
    """Return the error of the first wrong sequence from `at` on."""
    here = lengths[at : at + CHUNK].astype(np.int64)
    negative = np.flatnonzero(here < 0)[:1] + at
    begins = pointers[at : at + CHUNK + 1].copy()
    jumps = np.flatnonzero(np.diff(begins) != here[: len(begins) - 1] * itemsize)[:1] + at + 1
    if len(negative) and not (len(jumps) and jumps[0] < negative[0]) and pointers[0] == 0:
        bad = int(negative[0])
        return CorruptData(
            f"{path}: offset {HEADER.size + 4 * bad}: sequence {bad} has length {lengths[bad]}"
        )
    bad = 0 if pointers[0] != 0 else int(jumps[0])
    end = 0 if bad == 0 else int(pointers[bad - 1]) + int(lengths[bad - 1]) * itemsize
    return CorruptData(
        f"{path}: offset {HEADER.size + 4 * len(lengths) + 8 * bad}: pointer of sequence {bad} is"
        f" {pointers[bad]}, the sequences before it end at {end} ({itemsize} bytes a token): wrong"
        " dtype code or a damaged index"
    )


def _check_documents(path: Path, indices: np.ndarray, count: int, parts: list[range]) -> None:
    """Refuse document indices that do not rise from 0 to the number of sequences."""
    offset = HEADER.size + 12 * count
    if indices[0] != 0 or indices[-1] != count:
        raise CorruptData(
            f"{path}: offset {offset}: document indices go from {indices[0]} to {indices[-1]}, must"
            f" be 0 to {count}"
        )

    def wrong(first: int, stop: int) -> int | None:
        """Return the start of the first chunk in which an index falls."""
        falls = np.empty(CHUNK, np.bool_)
        for at in range(first, stop, CHUNK):
            here = indices[at : min(at + CHUNK, stop) + 1]
            if np.less(here[1:], here[:-1], out=falls[: len(here) - 1]).any():
                return at
        return None

    at = _first(wrong, parts)
    if at is not None:
        bad = at + 1 + int(np.argmax(np.diff(indices[at : at + CHUNK + 1]) < 0))
        raise CorruptData(
            f"{path}: offset {offset + 8 * bad}: document index {bad} is {indices[bad]}, "
            f"less than {indices[bad - 1]} before it"
        )


def _first(wrong: Callable[[int, int], int | None], parts: list[range]) -> int | None:
    """Return the first result of `wrong` in some ranges, with several threads for a long range."""
    if len(parts) == 1:
        (part,) = parts
        threads = min(4, os.cpu_count() or 1, 1 + len(part) // LONG)
        parts = [
            part[len(part) * i // threads : len(part) * (i + 1) // threads] for i in range(threads)
        ]
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                found = pool.map(lambda part: wrong(part.start, part.stop), parts)
                return next((at for at in found if at is not None), None)
    return next((at for part in parts if (at := wrong(part.start, part.stop)) is not None), None)
