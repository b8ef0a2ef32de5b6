"""Every kernel compiles for three generations of GPUs without spilling; needs no GPU, only a process of its own."""

from __future__ import annotations

import json
import subprocess

import pytest

pytest.importorskip("triton")

from mtrain_kernels import aot
from mtrain_kernels.aot import Row, table
from mtrain_kernels.registry import ops


def test_every_kernel_compiles_for_every_target_without_spilling(compilation: subprocess.Popen[str]) -> None:
    out, err = compilation.communicate()
    assert out, err
    said = json.loads(out)
    rows = [Row(**row) for row in said["rows"]]
    print(table(rows))
    assert said["faults"] == []
    with_kernels = [name for name, op in ops().items() if "triton" in op.implementations]
    assert {(row.op, row.arch) for row in rows} == {(name, arch) for name in with_kernels for arch in (80, 90, 100)}


def test_a_spill_and_too_much_shared_memory_are_faults() -> None:
    row = Row("norm", "tiny", "kernel", 80, 4, 255, 200 * 1024, 16)
    assert len(row.faults()) == 2
    assert Row("norm", "tiny", "kernel", 90, 4, 255, 200 * 1024, 0).faults() == []


def test_an_interpreted_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain_kernels.runtime.interpreted", lambda: True)
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        aot.compile_op("norm", "tiny", 90)
