"""Faults in the norms of a model, each of which a CUDA graph would not take or repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _item(norm: Any, y: Tensor) -> Tensor:
    return y * y.amax().item()


def _shape(norm: Any, y: Tensor) -> Tensor:
    return y + y.flatten().nonzero().shape[0]


def _counter(norm: Any, y: Tensor) -> Tensor:
    norm.calls = getattr(norm, "calls", 0) + 1
    return y * norm.calls


def _freed(norm: Any, y: Tensor) -> Tensor:
    held = getattr(norm, "held", torch.ones(1, dtype=y.dtype, device=y.device))
    # What a graph has read lies here no more.
    norm.held = torch.ones(1, dtype=y.dtype, device=y.device)
    return y * held


FAULTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "item": _item,
    "shape": _shape,
    "counter": _counter,
    "freed": _freed,
}


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Put a fault behind every norm of a decoder layer inside."""
    from mtrain.mcore.layers.residual import ResidualNorm

    real = ResidualNorm.forward
    fault = FAULTS[name]

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        y = real(self, x, residual)
        return y if residual is not None or x is None else fault(self, y)

    with mock.patch.object(ResidualNorm, "forward", forward):
        yield
