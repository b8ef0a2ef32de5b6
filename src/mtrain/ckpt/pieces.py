"""The elements of the pieces of a tensor that make up a box of it, for torch and numpy alike.

Needs no torch.

Elements are counted in row-major order. Memory on both sides is a flat range of a box, so what a
piece and the wanted box share falls into a few boxes, each with a stride for every axis on both
sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from mtrain.errors import CorruptData

Piece = dict[str, Any]
"""Entry of a manifest: file, entry, offset and shape of a box; flat range of a part of it."""
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Elements of a tensor that are contiguous in memory: a box, or the range `flat` of it."""

    offset: Numbers
    shape: Numbers
    flat: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return prod(self.shape) if self.flat is None else self.flat[1] - self.flat[0]

    def span(self, whole: Numbers) -> tuple[int, int]:
        """Return its first element, and the one after its last, counted in a tensor of shape
        `whole`; between them may be elements of other regions.
        """
        if not self.size:
            return 0, 0
        low, high = self.flat or (0, self.size)
        return self._place(low, whole), self._place(high - 1, whole) + 1

    def _place(self, element: int, whole: Numbers) -> int:
        """Return the place in a whole tensor of an element that is counted in the box."""
        place = 0
        stride = 1
        for offset, size, of in zip(*map(reversed, (self.offset, self.shape, whole)), strict=True):
            element, along = divmod(element, size)
            place += (offset + along) * stride
            stride *= of
        return place


@dataclass(frozen=True)
class Part:
    """A box that a piece and the wanted region share."""

    piece: Piece
    start: int
    """First element to read, counted in the piece."""
    stop: int
    """The element after the last one."""
    shape: Numbers
    there: Numbers
    """Stride of each axis in the source, in elements."""
    at: int
    """The first element of the box in the memory of the wanted region."""
    here: Numbers
    """Stride of each axis in that memory."""


def parts(wanted: Region, pieces: Iterable[Piece], limit: int, what: str) -> Iterator[Part]:
    """Yield the parts of `pieces` to read, with their places in memory, that together fill
    `wanted`.

    Args:
        wanted: the region to fill.
        pieces: the pieces of its tensor; one that is listed twice counts once.
        limit: about how many elements to read at once.
        what: the beginning of an error's message.

    Raises:
        CorruptData: the pieces do not cover the region; raised after the last part.
    """
    covered = 0
    boxes = list(_boxes(wanted))
    for (offset, shape, flat), piece in _meeting(wanted, pieces).items():
        held = Region(offset, shape, (flat[0], flat[1]) if flat else None)
        for (at, mine), (start, theirs) in product(boxes, list(_boxes(held))):
            if _meet(mine.offset, mine.shape, theirs.offset, theirs.shape):
                shared = _shared(mine, theirs)
                covered += shared.size
                yield from _cut(piece, shared, (start, theirs), (at, mine), limit)
    if covered != wanted.size:
        raise CorruptData(f"{what} cover {covered} of {wanted.size} elements of a box")


def _meeting(
    wanted: Region, pieces: Iterable[Piece]
) -> dict[tuple[Numbers, Numbers, Numbers], Piece]:
    """Return the pieces that may share elements with `wanted`, by offset, shape and flat range."""
    offset = list(wanted.offset)
    shape = list(wanted.shape)
    flat = wanted.flat
    meeting = {}
    for piece in pieces:
        range_of = piece["flat"]
        # The usual case first, without arithmetic: the layout that reads is the one that wrote.
        if piece["offset"] == offset and piece["shape"] == shape:
            if flat and range_of and (range_of[1] <= flat[0] or flat[1] <= range_of[0]):
                continue
        elif not _meet(wanted.offset, wanted.shape, piece["offset"], piece["shape"]):
            continue
        # Replicas write the same piece: it counts once.
        meeting[tuple(piece["offset"]), tuple(piece["shape"]), tuple(range_of or ())] = piece
    return meeting


def _boxes(region: Region) -> Iterator[tuple[int, Region]]:
    """Yield the boxes that a region consists of, each with its place in the region's memory.

    A range that begins and ends within rows consists of several.
    """
    if region.flat is None:
        yield 0, region
        return
    lo, hi = region.flat
    for offset, shape in _ranges(region.shape, lo, hi):
        place = sum(o * s for o, s in zip(offset, _strides(region.shape), strict=True)) - lo
        yield place, Region(tuple(a + b for a, b in zip(region.offset, offset, strict=True)), shape)


def _ranges(shape: Numbers, lo: int, hi: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield offset and shape of the boxes that elements [lo, hi) of a box consist of."""
    if not shape:
        if lo < hi:
            yield (), ()
        return
    row = prod(shape[1:])
    first = -(-lo // row)
    last = hi // row
    if first > last:  # within one row
        yield from _of_row(shape, last, lo - last * row, hi - last * row)
        return
    if lo < first * row:
        yield from _of_row(shape, first - 1, lo - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < hi:
        yield from _of_row(shape, last, 0, hi - last * row)


def _of_row(shape: Numbers, row: int, lo: int, hi: int) -> Iterator[tuple[Numbers, Numbers]]:
    for offset, inner in _ranges(shape[1:], lo, hi):
        yield (row, *offset), (1, *inner)


def _strides(shape: Numbers) -> Numbers:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _meet(a: Numbers, a_shape: Numbers, b: Iterable[int], b_shape: Iterable[int]) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a, a_shape, b, b_shape, strict=True))


def _shared(a: Region, b: Region) -> Region:
    lo = tuple(map(max, a.offset, b.offset))
    ends = (
        min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
    return Region(lo, tuple(end - start for start, end in zip(lo, ends, strict=True)))


def _cut(
    piece: Piece, shared: Region, theirs: tuple[int, Region], mine: tuple[int, Region], limit: int
) -> Iterator[Part]:
    """Cut a shared box into parts of at most `limit` elements to read."""
    start, box = theirs
    at, target = mine
    there = _strides(box.shape)
    here = _strides(target.shape)
    span = 1 + sum((n - 1) * stride for n, stride in zip(shared.shape, there, strict=True))
    axis = next((axis for axis, n in enumerate(shared.shape) if n > 1), None)
    # A strided box is read with the gaps between its rows: it may span much more than it has.
    if span > limit and axis is not None:
        step = max(1, limit // there[axis])
        end = shared.offset[axis] + shared.shape[axis]
        for first in range(shared.offset[axis], end, step):
            offset = (*shared.offset[:axis], first, *shared.offset[axis + 1 :])
            shape = (*shared.shape[:axis], min(step, end - first), *shared.shape[axis + 1 :])
            yield from _cut(piece, Region(offset, shape), theirs, mine, limit)
        return
    start += sum((o - p) * s for o, p, s in zip(shared.offset, box.offset, there, strict=True))
    at += sum((o - p) * s for o, p, s in zip(shared.offset, target.offset, here, strict=True))
    yield Part(piece, start, start + span, shared.shape, there, at, here)
