"""Whether two tensors hold the same numbers, and how far they are apart."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mtrain.convert.words import IN_TORCH, Words, as_tensor


class Held(Protocol):
    """Weights by name."""

    @property
    def names(self) -> frozenset[str]: ...
    def dtype(self, name: str) -> str: ...
    def tensor(self, name: str) -> Words: ...


def difference(source: Held, name: str, of: str) -> str:
    """How two tensors of one place differ, in words; empty where they hold the same numbers, in
    whatever format.

    Raises:
        CorruptData: one cannot be read.
    """
    return apart(source.tensor(name), source.dtype(name), source.tensor(of), source.dtype(of))


def apart(x: Words, of_x: str, y: Words, of_y: str) -> str:
    """How tensors of the formats `of_x` and `of_y` differ, in words; empty where they hold the same
    numbers.
    """
    if x.shape != y.shape:
        return f"shapes {list(x.shape)} and {list(y.shape)}"
    if of_x == of_y and np.array_equal(x, y):
        return ""
    wide = [
        as_tensor(np.ascontiguousarray(words), kind).double()
        for words, kind in ((x, of_x), (y, of_y))
    ]
    off = (wide[0] - wide[1]).abs()
    count = int((off != 0).sum())
    if count == 0 and of_x != of_y:
        return ""
    kinds = "" if of_x == of_y else f", {IN_TORCH[of_x]} and {IN_TORCH[of_y]}"
    return f"{count} of {off.numel()} numbers differ, by up to {off.max().item():.3g}{kinds}"
