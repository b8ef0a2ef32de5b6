"""The addresses of all groups' tensors, so that one kernel reads them without copying them
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.device_tables import DeviceTables

_TABLES = DeviceTables(4096)
"""Distances of each unevenly spaced set of tensors.

Weights that are gathered anew lie elsewhere in every step.
"""


@dataclass(frozen=True)
class Places:
    """Addresses of groups' dense tensors [n, k]: the first one, and the element offset from it to
    each.
    """

    tensors: tuple[Tensor, ...]
    shape: tuple[int, int]
    groups: int
    step: int
    """Distance from one to the next, in elements; negative if addresses descend, as in
    megatron-core's buffers.
    """
    table: Tensor | None
    """The distance of each from the first, int64 [g], where one step does not lead to all."""
    aligned: bool
    """True if all distances are multiples of 16 elements."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Places:
        """Return the places of one [n, k] for each group, or of one [g, n, k].

        Nothing waits for the device. A table is made when a set of tensors is first met.
        """
        dense = tuple(t.contiguous() for t in tensors)
        first = dense[0]
        if first.ndim == 3:
            groups, n, k = first.shape
            return cls(dense, (n, k), groups, n * k, None, n * k % 16 == 0)
        distances = _distances(dense)
        step = distances[1] if len(distances) > 1 else 0
        even = all(d == i * step for i, d in enumerate(distances))
        aligned = not any(d % 16 for d in distances)
        n, k = first.shape
        return cls(
            dense,
            (n, k),
            len(dense),
            step if even else 0,
            None if even else _table(first, distances),
            aligned,
        )

    @property
    def base(self) -> Tensor:
        """Return the first group's tensor, or all of them."""
        return self.tensors[0]

    @property
    def even(self) -> bool:
        """Return whether one descriptor leads to all: steps of whole 16 bytes, up- or downward, and
        none within a tensor.
        """
        n, k = self.shape
        bytes_ = self.base.element_size()
        fits = (
            (self.groups == 1 or abs(self.step) >= n * k)
            and self.step * bytes_ % 16 == 0
            and k * bytes_ % 16 == 0
        )
        # A descriptor counts upward, so it starts at the last of tensors that lie downward.
        lowest = self.tensors[-1] if self.step < 0 else self.base
        return self.table is None and fits and (lowest.is_meta or lowest.data_ptr() % 16 == 0)

    def descriptor(self, tile: Any, block: list[int]) -> Any:
        """Return a TMA descriptor [g, n, k] of all of them, counted from the one that
        lies lowest.
        """
        lowest = self.tensors[-1] if self.step < 0 else self.base
        n, k = self.shape
        shape = [self.groups, n, k]
        return tile.described(lowest, shape, [abs(self.step) or n * k, k, 1], block)


def _distances(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    size = tensors[0].element_size()
    begin = tensors[0].data_ptr()
    return tuple((t.data_ptr() - begin) // size for t in tensors)


def _table(like: Tensor, distances: tuple[int, ...]) -> Tensor:
    return _TABLES.of(distances, like.device, lambda: torch.tensor(distances, dtype=torch.int64))
