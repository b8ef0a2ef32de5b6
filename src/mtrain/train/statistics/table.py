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
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

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
        pairs = [(self.places[r], x) for r, x in zip(rows, tensors, strict=True) if x.numel()]
        if not pairs:
            return
        parts = [x for _, x in pairs]
        norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
        largest = torch._foreach_norm(parts, math.inf)
        columns = (
            [x.new_full((), x.numel(), dtype=torch.float64) for x in parts],
            [x.sum(dtype=torch.float32) for x in parts],
            norms,
            [torch.count_nonzero(x) for x in parts],
            largest,
        )
        found = torch.stack([self._column(column) for column in columns], dim=1)
        found[:, 2].square_()
        found[:, 3] = found[:, 0] - found[:, 3]
        index = self._index(tuple(place for place, _ in pairs))
        self._values[:, :_SUMS].index_add_(0, index, found[:, :_SUMS])
        self._values[:, _SUMS].scatter_reduce_(0, index, found[:, _SUMS], "amax")

    def _column(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        # Moments may be in host memory, where an offloading optimizer keeps them.
        return torch.stack([n.double() for n in numbers]).to(self.device, non_blocking=True)

    def _index(self, places: tuple[int, ...]) -> torch.Tensor:
        if places not in self._indices:
            # Made once: a copy from host memory in each step would be one more launch.
            self._indices[places] = torch.tensor(places).to(self.device, non_blocking=True)
        return self._indices[places]

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
