"""Boxes of tensors put together from the pieces that a checkpoint holds: torch's tensors and numpy's arrays alike.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

from mtrain.errors import CorruptData

Piece = dict[str, Any]
"""As a manifest describes it: file, entry, offset and shape of a box, and its flat range where it is not whole."""


def assemble(
    box: Any,
    offset: tuple[int, ...],
    pieces: Iterable[Piece],
    read: Callable[[Piece], Any],
    join: Callable[[list[Any]], Any],
    what: str,
) -> None:
    """Fill `box`, which lies at `offset` in its tensor, from the pieces that meet it.

    Args:
        box: what is filled.
        offset: where it lies.
        pieces: of its tensor.
        read: the numbers of a piece.
        join: flat ranges behind each other.
        what: what the message of an error begins with.

    Raises:
        CorruptData: they do not cover it.
    """
    covered = 0
    for held, source in _boxes(box, offset, pieces, read, join, what):
        covered += _copy_overlap(box, offset, source, held["offset"])
    size = prod(box.shape)
    if covered != size:
        raise CorruptData(f"{what} cover {covered} of {size} elements of a box")


def _boxes(
    box: Any,
    offset: tuple[int, ...],
    pieces: Iterable[Piece],
    read: Callable[[Piece], Any],
    join: Callable[[list[Any]], Any],
    what: str,
) -> Iterator[tuple[Piece, Any]]:
    """Each stored box that meets the one that is asked for, put together from its flat ranges where it was cut."""
    boxes: dict[tuple[Any, Any], list[Piece]] = {}
    for piece in pieces:
        if _meets(offset, box.shape, piece["offset"], piece["shape"]):
            boxes.setdefault((tuple(piece["offset"]), tuple(piece["shape"])), []).append(piece)
    for (_, shape), found in boxes.items():
        if found[0]["flat"] is None:
            yield found[0], read(found[0]).reshape(shape)
            continue
        found.sort(key=lambda piece: piece["flat"][0])
        bounds, size = [piece["flat"] for piece in found], prod(shape)
        flat = join([read(piece) for piece in found])
        joined = all(a[1] == b[0] for a, b in pairwise(bounds))
        if not joined or bounds[0][0] != 0 or prod(flat.shape) != size:
            raise CorruptData(f"{what}: flat pieces do not cover a box of {size} elements")
        yield found[0], flat.reshape(shape)


def _meets(a: Iterable[int], a_shape: Iterable[int], b: Iterable[int], b_shape: Iterable[int]) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a, a_shape, b, b_shape, strict=True))


def _copy_overlap(box: Any, offset: tuple[int, ...], source: Any, at: list[int]) -> int:
    """Copy the part of `source` (a box at `at`) that lies in `box` (at `offset`); returns its elements."""
    here, there = [], []
    for o, n, a, m in zip(offset, box.shape, at, source.shape, strict=True):
        lo, hi = max(o, a), min(o + n, a + m)
        here.append(slice(lo - o, hi - o))
        there.append(slice(lo - a, hi - a))
    box[(*here, ...)] = source[(*there, ...)]
    return prod(part.stop - part.start for part in here)
