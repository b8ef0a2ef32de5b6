"""Launches that look their binary up: the one that Triton would choose, with the same arguments.

Each test runs in a process of its own, where kernels are compiled for sm_90 and not interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BEGIN = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import host_cost_driver
host_cost_driver.install()
import itertools, torch, triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from mtrain_kernels import launch_triton
from mtrain_kernels.launch_triton import kernel

@kernel
def scale_kernel(x_ptr, y_ptr, n, factor, SIZE: tl.constexpr, FLAG: tl.constexpr = False):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0) * factor
    if FLAG:
        x += 1.0
    tl.store(y_ptr + at, x, mask=at < n)

calls = 0
run = JITFunction.run
def counted(self, *args, **more):
    global calls
    calls += 1
    return run(self, *args, **more)
JITFunction.run = counted
"""


def _runs(tmp_path: Path, script: str) -> None:
    """Run a script in which `kernel` compiles; it fails by its own assertions."""
    file = tmp_path / "script.py"
    file.write_text(BEGIN + script)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_launch_every_kind_takes_the_binary_of_triton(tmp_path: Path) -> None:
    _runs(
        tmp_path,
        """
memory = torch.zeros(4096, dtype=torch.uint8)
aligned, further = (memory[at : at + 1024].view(torch.float32) for at in (0, 16))
misaligned = memory[8 : 8 + 1024].view(torch.float32)
half = memory[:1024].view(torch.bfloat16)
plain = (aligned, aligned, 17, 0.5, {"SIZE": 16})
cases = [
    *((x, *plain[1:]) for x in (aligned, further, misaligned, half)),
    *((*plain[:2], n, *plain[3:])
      for n in (0, 1, 2, 16, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -2**31, 2**40)),
    *((*plain[:3], factor, plain[4]) for factor in (1.0, 0.25, 3)),
    *((*plain[:4], more) for more in
      ({"SIZE": 32}, {"SIZE": 16, "FLAG": True}, {"SIZE": 16, "num_warps": 8})),
]
# Twice, so that every case is also looked up after all others.
for x, y, n, factor, more in cases * 2:
    taken = scale_kernel[(2,)](x, y, n, factor, **more)
    wanted = run(scale_kernel, x, y, n, factor, grid=(2,), warmup=True, **more)
    assert taken is wanted, (x.dtype, x.data_ptr() % 16, n, factor, more)
assert 0 < calls < len(cases), calls
""",
    )


def test_launch_again_passes_what_triton_passes(tmp_path: Path) -> None:
    _runs(
        tmp_path,
        """
x, y, other = (torch.zeros(64) for _ in range(3))
passed = []
first = scale_kernel[(2, 3)](x, y, 16, 0.5, SIZE=16)
launcher = first.run
first._run = lambda *args: passed.append(args)
run(scale_kernel, other, y, 32, 0.25, grid=(2, 3), warmup=False, SIZE=16)
assert scale_kernel[(2, 3)](other, y, 32, 0.25, SIZE=16) is first
assert calls == 1
assert len(passed) == 2
# What the hooks of Triton would get is made where there is one only.
hooks = slice(6, 9)
assert passed[1][hooks] == (None, None, None)
for one in range(2):
    passed[one] = (*passed[one][:6], *passed[one][9:])
assert passed[0] == passed[1]
# A hook of Triton's, such as a profiler's, gets its description of the launch either way.
seen = []
triton.knobs.runtime.launch_enter_hook = lambda metadata: seen.append(metadata)
scale_kernel[(2, 3)](other, y, 32, 0.25, SIZE=16)
assert passed[2][6].get()["name"] == "scale_kernel"
""",
    )


@pytest.mark.full
def test_launch_other_objects_are_left_to_triton(tmp_path: Path) -> None:
    _runs(
        tmp_path,
        """
x, y = (torch.zeros(64) for _ in range(2))
for _ in range(2):
    scale_kernel[(2,)](x, y, n=16, factor=0.5, SIZE=16)
assert calls == 2
for _ in range(2):
    scale_kernel[(2,)](x, y, 16, 0.5, 16)
assert calls == 4, "a constant by position has a value, not a kind"
launch_triton.MOST = 2
for size in (16, 32, 64, 128):
    scale_kernel[(2,)](x, y, 16, 0.5, SIZE=size)
assert len(scale_kernel._known) <= 2
""",
    )


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["ALIGNED = 1", "INT32_BITS = 99"])
def test_launch_that_forgets_a_kind_is_found(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="AssertionError"):
        _runs(
            tmp_path,
            f"""
launch_triton.{wrong}
memory = torch.zeros(4096, dtype=torch.uint8)
y = torch.zeros(64)
for start, n in ((0, 17), (8, 17), (0, 2**31 + 1)):
    x = memory[start : start + 1024].view(torch.float32)
    taken = scale_kernel[(2,)](x, y, n, 0.5, SIZE=16)
    assert taken is run(scale_kernel, x, y, n, 0.5, grid=(2,), warmup=True, SIZE=16)
""",
        )
