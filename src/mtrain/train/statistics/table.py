"""Sums over the parts of whole tensors, added up over all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mtrain.train.statistics.part import Part

Row = tuple[str, str]
"""The kind of a tensor, such as `gradients`, and its name."""
Rows = dict[str, dict[str, list[float]]]
"""Numbers by kind and name."""
COLUMNS = ("norm", "mean", "max", "zeros")
"""Euclidean norm, mean, largest absolute value and share of zeros."""
_SUMS = 4


class Table:
    """Elements, sum, squares and zeros of each row, and its largest absolute value, on the device.

    Nothing here waits for the device. All ranks have the same rows in the same order.
    """

    def __init__(self, rows: Iterable[Row], device: torch.device) -> None:
        self.rows = list(rows)
        self.places = {row: place for place, row in enumerate(self.rows)}
        self.device = device
        self._values = torch.zeros(len(self.rows), _SUMS + 1, dtype=torch.float64, device=device)
        self._known: dict[tuple[tuple[int, int], ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def width(self) -> int:
        """Return the numbers of its own that `reduced` returns."""
        return self._values.numel()

    def clear(self) -> None:
        """Begin a step."""
        self._values.zero_()

    @torch.no_grad()
    def add(self, rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> None:
        """Add the elements of tensors to their rows; several tensors may be parts of one row."""
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for row, x in zip(rows, tensors, strict=True):
            if x.numel():
                by_device.setdefault(x.device, []).append((self.places[row], x))
        # Moments may be in host memory, where an offloading optimizer keeps them.
        for found in by_device.values():
            self._add(found)

    def _add(self, found: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Add tensors of one device; a launch for each tensor is what costs most, so there are
        few.
        """
        parts = [x for _, x in found]
        index, elements = self._indices(tuple((place, x.numel()) for place, x in found))
        columns = (
            torch.stack([x.sum(dtype=torch.float32) for x in parts]),
            torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)),
            torch.stack([torch.count_nonzero(x) for x in parts]),
            torch.stack(torch._foreach_norm(parts, math.inf, dtype=torch.float32)),
        )
        moved = (column.double().to(self.device, non_blocking=True) for column in columns)
        total, norm, nonzero, largest = moved
        sums = torch.stack([elements, total, norm.square_(), elements - nonzero], dim=1)
        self._values[:, :_SUMS].index_add_(0, index, sums)
        self._values[:, _SUMS].scatter_reduce_(0, index, largest, "amax")

    def _indices(self, found: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of tensors and their elements, on the device."""
        if found not in self._known:
            # Made once: a copy from host memory in each step would be one more launch.
            places, elements = zip(*found, strict=True)
            index = torch.tensor(places).to(self.device, non_blocking=True)
            counts = torch.tensor(elements, dtype=torch.float64)
            self._known[found] = index, counts.to(self.device, non_blocking=True)
        return self._known[found]

    def reduced(self, parts: Sequence[Part] = ()) -> torch.Tensor:
        """Return the numbers over all ranks, and behind them sums and largest values of each of
        `parts`, fp64; each rank calls it.
        """
        own = [self._values[:, :_SUMS], *(part.sums for part in parts)]
        largest = [self._values[:, _SUMS], *(part.maxima for part in parts)]
        sums = torch.cat([each.flatten() for each in own])
        maxima = torch.cat([each.flatten() for each in largest])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        pairs = zip(
            sums.split([each.numel() for each in own]),
            maxima.split([each.numel() for each in largest]),
            strict=True,
        )
        return torch.cat([each for pair in pairs for each in pair])

    def read(self, numbers: Sequence[float]) -> Rows:
        """Return `COLUMNS` of each row by kind and name, of the numbers that `reduced` returned;
        without rows that had no element.
        """
        found: Rows = {}
        count = len(self.rows)
        for place, (kind, name) in enumerate(self.rows):
            elements, total, squares, zeros = numbers[_SUMS * place : _SUMS * place + _SUMS]
            if elements:
                largest = numbers[_SUMS * count + place]
                values = [math.sqrt(squares), total / elements, largest, zeros / elements]
                found.setdefault(kind, {})[name] = values
        return found
