"""Comparison of weights from two sources, tensor by tensor under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from mtrain.convert.exporter import Weights
from mtrain.convert.raw_arrays import IN_TORCH, RawArray, as_tensor


class NamedWeights(Protocol):
    """Weights by name."""

    @property
    def names(self) -> frozenset[str]: ...
    def dtype(self, name: str) -> str: ...
    def tensor(self, name: str) -> RawArray: ...


def difference(source: NamedWeights, name: str, of: str) -> str:
    """Describe how two tensors of one source differ; "" if their numbers are equal in any format.

    Raises:
        CorruptData: one cannot be read.
    """
    return apart(source.tensor(name), source.dtype(name), source.tensor(of), source.dtype(of))


def apart(x: RawArray, of_x: str, y: RawArray, of_y: str) -> str:
    """Describe how tensors of formats `of_x` and `of_y` differ; "" if their numbers are equal."""
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
class CheckpointWeights:
    """The weights of a checkpoint as a source; the tensors of one step are made together."""

    weights: Weights

    def __post_init__(self) -> None:
        self._step_of = {name: step for step in self.weights.found.steps for name in step.theirs}
        self.names = frozenset(self._step_of)
        self._made: dict[str, RawArray] = {}

    def dtype(self, name: str) -> str:
        """Return the number format of a tensor."""
        return self.weights.dtype_of(self._step_of[name])

    def tensor(self, name: str) -> RawArray:
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
    """The comparison of one tensor."""

    name: str
    equal: bool
    # a key of `convert verify --json`, so that the name stays
    said: str = ""


def compare(
    a: NamedWeights, b: NamedWeights, copies: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[Row], list[str]]:
    """Return a row for each tensor that both have, and the names that only one of them has.

    `copies` maps a tensor that a source may also store to the one that it repeats; a stored copy
    gets a row, too.

    Raises:
        CorruptData: one cannot be read.
    """
    rows = list(_rows(a, b))
    unmatched = []
    for name in sorted(a.names ^ b.names):
        # transformers' own folders may lack the copy, and files of others may have it
        of = copies.get(name)
        place = a if name in a.names else b
        if of in place.names:
            found = difference(place, name, of)
            rows.append(Row(name, not found, found))
        else:
            unmatched.append(name)
    return rows, unmatched


def _rows(a: NamedWeights, b: NamedWeights) -> Iterator[Row]:
    for name in sorted(a.names & b.names):
        x = a.tensor(name)
        y = b.tensor(name)
        of_x = a.dtype(name)
        of_y = b.dtype(name)
        if x.shape != y.shape:
            yield Row(name, False, f"shapes {list(x.shape)} and {list(y.shape)}")
        # bits first: equal ones need no torch
        elif of_x == of_y and np.array_equal(x, y):
            yield Row(name, True)
        else:
            difference = as_tensor(x, of_x).double() - as_tensor(y, of_y).double()
            apart = difference.abs().max().item() if x.size else 0.0
            kinds = "" if of_x == of_y else f", {IN_TORCH[of_x]} and {IN_TORCH[of_y]}"
            yield Row(name, False, f"largest difference {apart:.3g}{kinds}")
