"""Whether two places hold the same weights, tensor by tensor under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from mtrain.convert.exporter import Weights
from mtrain.convert.raw_arrays import IN_TORCH, Words, as_tensor


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


@dataclass
class OfCheckpoint:
    """A checkpoint as such a source: the tensors of one step are made together."""

    weights: Weights

    def __post_init__(self) -> None:
        self._step_of = {name: step for step in self.weights.found.steps for name in step.theirs}
        self.names = frozenset(self._step_of)
        self._made: dict[str, Words] = {}

    def dtype(self, name: str) -> str:
        """Return number format of what `tensor` gives."""
        return self.weights.dtype_of(self._step_of[name])

    def tensor(self, name: str) -> Words:
        """Return a weight.

        Raises:
            CorruptData: the checkpoint cannot be read.
        """
        if name not in self._made:
            self._made = {
                key: made.words for key, made in self.weights.of_step(self._step_of[name], None)
            }
        return self._made.pop(name)


class Row(NamedTuple):
    """What became of one tensor."""

    name: str
    equal: bool
    said: str = ""


def compare(
    a: Held, b: Held, copies: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Row], list[str]]:
    """Return a row for each tensor that both have, and the names that one of them has alone.

    `copies` are tensors that a place may have beside the one that each of them repeats: where it
    does, there is a row for it, too.

    Raises:
        CorruptData: one cannot be read.
    """
    rows = list(_rows(a, b))
    alone = []
    for name in sorted(a.names ^ b.names):
        of = copies.get(name)
        place = a if name in a.names else b
        if of in place.names:
            found = difference(place, name, of)
            rows.append(Row(name, not found, found))
        else:
            alone.append(name)
    return rows, alone


def _rows(a: Held, b: Held) -> Iterator[Row]:
    for name in sorted(a.names & b.names):
        x = a.tensor(name)
        y = b.tensor(name)
        of_x = a.dtype(name)
        of_y = b.dtype(name)
        if x.shape != y.shape:
            yield Row(name, False, f"shapes {list(x.shape)} and {list(y.shape)}")
        elif of_x == of_y and np.array_equal(x, y):
            yield Row(name, True)
        else:
            difference = as_tensor(x, of_x).double() - as_tensor(y, of_y).double()
            apart = difference.abs().max().item() if x.size else 0.0
            kinds = "" if of_x == of_y else f", {IN_TORCH[of_x]} and {IN_TORCH[of_y]}"
            yield Row(name, False, f"largest difference {apart:.3g}{kinds}")
