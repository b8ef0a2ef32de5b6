"""The recorder of what a CUDA graph would keep finds each kind of fault, with its line, and nothing
else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain.devices import cpu_namespace
from mtrain.train.trace.stand_ins import COPIES, DEPENDS, WAITS
from tests.support.capture_recorder import (
    CHANGES,
    FREED,
    KEPT,
    MOVED,
    SYNCHRONISES,
    replayed,
)

META = torch.device("meta")
WIDTH = 8


class Layer(torch.nn.Module):
    """A small layer, with state that faults may use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH, device=META))
        self.table = torch.empty(WIDTH, device=META)
        self.calls = 0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x @ self.weight + self.table), 0.1)


class Reads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * y.amax().item()


class Decides(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if (y > 0).any() else -y


class Selects(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y[:, 0] > 0]


class FindsPlaces(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.index_select(0, y[:, 0].nonzero()[:, 0])


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 / self.calls)


class Grows(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        return y + 1 if self.calls == 2 else y


class Resizes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + torch.zeros(self.calls, 1, device=x.device).sum()


class Frees(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table

    def after(self) -> None:
        self.table = torch.empty(WIDTH, device=META)


class Moves(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.empty(WIDTH, device=META) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.tables[0]

    def after(self) -> None:
        self.tables.reverse()


class MakesOnHost(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([0.5], device=x.device)


class CopiesFromHost(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.ones(WIDTH).to(x.device)


class CopiesToHost(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.sum().cpu()
        return y


class BakesHostNumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * torch.tensor(float(self.calls))


class Keeps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept

    def after(self) -> None:
        assert self.kept is not None
        self.kept.sum()


class Waits(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        cpu_namespace.current_stream().synchronize()
        return y


class _ReadsLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * dy.amax().item()


class ReadsInBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ReadsLater.apply(super().forward(x))
        return y


FAULTS: tuple[tuple[type[Layer], str, str], ...] = (
    (Reads, WAITS, ".item()"),
    (Decides, WAITS, ".any()"),
    (Selects, DEPENDS, "y[y["),
    (FindsPlaces, DEPENDS, ".nonzero()"),
    (Counts, CHANGES, "1 / self.calls"),
    (Grows, CHANGES, "y + 1"),
    (Resizes, CHANGES, "self.calls, 1"),
    (Frees, FREED, "self.table"),
    (Moves, MOVED, "self.tables[0]"),
    (MakesOnHost, COPIES, "torch.tensor"),
    (CopiesFromHost, COPIES, ".to(x.device)"),
    (CopiesToHost, WAITS, ".cpu()"),
    (BakesHostNumber, CHANGES, "torch.tensor"),
    (Keeps, KEPT, "self.kept.sum()"),
    (Waits, SYNCHRONISES, ".synchronize()"),
    (ReadsInBackward, WAITS, "dy.amax().item()"),
)
"""A layer, the kind of its fault, and a part of the line where it is."""


def _found(layer: Layer) -> list[Any]:
    x = torch.empty(4, WIDTH, device=META)
    after: Callable[[], Any] = getattr(layer, "after", lambda: None)

    def step(_: int) -> None:
        layer(x).sum().backward()
        layer.weight.grad = None

    return replayed(step, x, between=after)


def test_capture_recorder_good_layer_has_no_findings() -> None:
    assert _found(Layer()) == []


@pytest.mark.parametrize(("layer", "kind", "line"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_capture_recorder_fault_is_found_with_line(
    layer: type[Layer], kind: str, line: str
) -> None:
    found = [finding for finding in _found(layer()) if finding.kind == kind]
    assert found, kind
    path, _, number = found[0].where.partition(" ")[0].rpartition(":")
    assert __file__.endswith(path)
    assert line in inspect.getsource(inspect.getmodule(layer)).splitlines()[int(number) - 1]  # type: ignore[arg-type]
