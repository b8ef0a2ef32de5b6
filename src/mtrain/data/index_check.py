"""Whether an `.idx` adds up: all of it, or of a large one the ends, parts in between, and the rest
bit by bit.

What a run reads of an index of 1e8 documents is a few places, and the file has 2 GB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mtrain.config.disk.token_files import HEADER
from mtrain.data.mapped import Mapped
from mtrain.errors import CorruptData

CHUNK = 1 << 17
LONG = 1 << 23
"""Numbers of which a thread more is worth its while."""
LARGE = 1 << 22
"""Sequences and documents up to which an index is read as a whole: it has 84 MB."""
PARTS = 32
PART = 1 << 10
"""How many parts of a larger one are read when it is opened, and the sequences and documents of
each.
"""
STEP = 1 << 18
"""Sequences and documents that are read of a larger one each time that the run goes on."""


class IndexCheck:
    """The check of an index. Raises CorruptData, naming file and offset."""

    def __init__(
        self,
        path: Path,
        file: Mapped,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        itemsize: int,
    ) -> None:
        """`arrays`: lengths, pointers and document indices, as they stand in the file."""
        self._path = path
        self._file = file
        self._itemsize = itemsize
        self._lengths, self._pointers, self._documents = lengths, _, documents = arrays
        self._size = max(len(lengths), len(documents) - 1)
        self._next = 0

    def opened(self, *, whole: bool) -> int:
        """Look at all of it, or at the ends and some parts where it is large; bytes that `.bin` is
        to have.
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
        """Look at the next part of what was not looked at as a whole."""
        if self._next < self._size:
            self._look([range(self._next, min(self._next + STEP, self._size))])
            self._next += STEP

    def look_at(self, documents: range) -> None:
        """Look at some consecutive documents and their sequences."""
        if self._next < self._size:
            _check_documents(self._path, self._documents, len(self._lengths), [documents])
            held = range(self.sequence(documents.start), self.sequence(documents.stop))
            if held:
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [held])

    def sequence(self, document: int) -> int:
        """Return the first sequence of a document."""
        found = int(self._documents[document])
        count = len(self._lengths)
        if self._next < self._size:
            if not 0 <= found <= count:
                said = f"document index {document} is {found}, and there are {count} sequences"
                raise CorruptData(
                    f"{self._path}: offset {HEADER.size + 12 * count + 8 * document}: {said}"
                )
            if near := range(max(0, found - 1), min(found + 1, count)):
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [near])
        return found

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
    """What of some ranges lies below `count`."""
    return [range(min(part.start, count), min(part.stop, count)) for part in parts]


def _check_pointers(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, parts: list[range]
) -> None:
    """Refuse negative lengths and pointers that are not the running sum."""

    def wrong(first: int, stop: int) -> int | None:
        """Return the first sequence of some that is wrong, by itself or by where the next one
        begins.
        """
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
    """What is wrong with the first sequence from `at` on with which something is."""
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
        """Return a chunk in which an index is less than the one before it."""
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
    """What `wrong` finds first in some ranges, looked through by several threads where
    one is long.
    """
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
