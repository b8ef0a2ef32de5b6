"""Every kernel compiles for three generations of GPUs without spilling; needs no GPU, only a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from mtrain_kernels import aot
from mtrain_kernels.aot import Row, table
from mtrain_kernels.registry import ops


@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.full), 90, pytest.param(100, marks=pytest.mark.full)]
)
def test_every_kernel_compiles_for_every_target_without_spilling(compilation: dict[str, Any], arch: int) -> None:
    rows = [row for row in (Row(**row) for row in compilation["rows"]) if row.arch == arch]
    print(table(rows))
    assert compilation["faults"] == []
    assert {row.op for row in rows} == {name for name, op in ops().items() if "triton" in op.implementations}


def test_a_spill_and_too_much_shared_memory_are_faults() -> None:
    row = Row("norm", "tiny", "kernel", 80, 4, 255, 200 * 1024, 16)
    assert len(row.faults()) == 2
    assert Row("norm", "tiny", "kernel", 90, 4, 255, 200 * 1024, 0).faults() == []


def test_an_interpreted_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain_kernels.runtime.interpreted", lambda: True)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        aot.compile_op("norm", "tiny", 90)
