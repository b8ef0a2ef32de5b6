"""Tables on a device are made once, and what a CUDA graph reads stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from mtrain_kernels import device_tables
from mtrain_kernels.device_tables import DeviceTables
from torch import Tensor

CPU = torch.device("cpu")


def made(number: int) -> Tensor:
    return torch.tensor([number])


def test_device_tables_are_cached_least_recent_go() -> None:
    tables = DeviceTables(2)
    first = tables.of("a", CPU, lambda: made(1))
    assert tables.of("a", CPU, lambda: made(2)) is first
    for key in ("b", "a", "c"):
        tables.of(key, CPU, lambda: made(3))
    assert tables.of("a", CPU, lambda: made(4)) is first
    assert tables.of("b", CPU, lambda: made(4)) == 4


def test_device_tables_graph_inputs_stay_outputs_are_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Tensor] = []
    monkeypatch.setattr(device_tables, "_READ_BY_GRAPHS", kept)
    tables = DeviceTables(1)
    before = weakref.ref(tables.of("before", CPU, lambda: made(1)))
    with monkeypatch.context() as capture:
        capture.setattr(device_tables, "capturing", lambda device: True)
        assert tables.of("before", CPU, lambda: made(2)) is before()
        inside = weakref.ref(tables.of("inside", CPU, lambda: made(3)))
    tables.of("behind", CPU, lambda: made(4))
    gc.collect()
    assert before() is not None
    assert inside() is not None
    assert tables.of("inside", CPU, lambda: made(5)) == 5, (
        "the one of the graph is not written before it runs"
    )
    kept.clear()
    gc.collect()
    assert before() is None
