"""Every kernel compiles for three generations of GPUs without spilling; needs no GPU, only a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from mtrain_kernels.aot import Row, table
from mtrain_kernels.registry import ops

PACKAGES = Path(__file__).resolve().parents[1]


def compiled_elsewhere(*arguments: str) -> tuple[list[Row], list[str]]:
    """The rows and the faults, from a process that does not interpret Triton."""
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "mtrain_kernels.aot", "--json", "--processes", "2", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    return [Row(**row) for row in said["rows"]], said["faults"]


def test_every_kernel_compiles_for_every_target_without_spilling() -> None:
    rows, faults = compiled_elsewhere()
    print(table(rows))
    assert faults == []
    with_kernels = [name for name, op in ops().items() if "triton" in op.implementations]
    assert {(row.op, row.arch) for row in rows} == {(name, arch) for name in with_kernels for arch in (80, 90, 100)}


def test_a_spill_and_too_much_shared_memory_are_faults() -> None:
    row = Row("norm", "tiny", "kernel", 80, 4, 255, 200 * 1024, 16)
    assert len(row.faults()) == 2
    assert Row("norm", "tiny", "kernel", 90, 4, 255, 200 * 1024, 0).faults() == []
