"""Whether two places hold the same weights, tensor by tensor under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mtrain.convert.out import Weights
from mtrain.convert.read import same


class Source(Protocol):
    """Weights by name; `Reader` is one."""

    @property
    def names(self) -> frozenset[str]: ...
    def tensor(self, name: str) -> torch.Tensor: ...


@dataclass
class OfCheckpoint:
    """A checkpoint as such a source: the tensors of one step are made together."""

    weights: Weights

    def __post_init__(self) -> None:
        self._step_of = {name: step for step in self.weights.found.steps for name in step.theirs}
        self.names = frozenset(self._step_of)
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """A weight.

        Raises:
            CorruptData: the checkpoint cannot be read.
        """
        if name not in self._made:
            self._made = dict(self.weights.of_step(self._step_of[name], None))
        return self._made.pop(name)


class Row(NamedTuple):
    """What became of one tensor."""

    name: str
    equal: bool
    said: str = ""


def compare(a: Source, b: Source) -> tuple[list[Row], list[str]]:
    """A row for each tensor that both have, and the names that one of them has alone.

    Raises:
        CorruptData: one cannot be read.
    """
    return list(_rows(a, b)), sorted(a.names ^ b.names)


def _rows(a: Source, b: Source) -> Iterator[Row]:
    for name in sorted(a.names & b.names):
        x, y = a.tensor(name), b.tensor(name)
        if x.shape != y.shape:
            yield Row(name, False, f"shapes {list(x.shape)} and {list(y.shape)}")
        elif same(x, y):
            yield Row(name, True)
        else:
            apart = (x.double() - y.double()).abs().max().item() if x.numel() else 0.0
            kinds = "" if x.dtype == y.dtype else f", {x.dtype} and {y.dtype}".replace("torch.", "")
            yield Row(name, False, f"largest difference {apart:.3g}{kinds}")
