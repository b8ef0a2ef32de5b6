"""`benchmarks/host_cost.py`: its driver counts every launch, and what it reports of a layer are the
launches of that layer. Each in a process without Triton's interpreter, which other tests run in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]

COUNTED = """
import json

import host_cost_driver

launches = host_cost_driver.install()
import torch
import triton
import triton.language as tl
from mtrain_kernels.norm.op import rms_norm


@triton.jit
def copy_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))


def counted(act):
    launches.clear()
    act()
    return dict(launches.by_kernel)


x = torch.ones(16, 128, dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
kept = copy_kernel[(1,)](x, x, N=128)
found = {
    "first": counted(lambda: copy_kernel[(1,)](x, x, N=128)),
    "kept": counted(lambda: kept[(1, 1, 1)](x, x, 128)),
    "both": counted(lambda: (copy_kernel[(1,)](x, x, N=128), kept[(1, 1, 1)](x, x, 128))),
    "empty grid": counted(lambda: copy_kernel[(0,)](x, x, N=128)),
    "norm": sum(counted(lambda: rms_norm(x, weight, 1e-5, impl="triton")).values()),
}
print(json.dumps(found))
"""

SEEDED = """
import json

import host_cost

host_cost.prepare()
import torch
import triton
import triton.language as tl
from host_cost_models import KINDS, contenders


@triton.jit
def extra_kernel(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at))


def measured(contender):
    contender.step()
    return host_cost.figures(contender, *host_cost.timed([contender], 2)[contender.name])


def launch(module, given, out):
    extra_kernel[(1,)](torch.ones(16), N=16)
    torch.ones(16).exp_()  # fills twice, with the operand of the kernel, and takes exponentials


with contenders(KINDS["dense"], 4, []) as (ours, *_, theirs):
    found = {"plain": measured(ours), "transformers": measured(theirs)}
    for layer in ours.layers:
        layer.mlp.register_forward_hook(launch)
    found["seeded"] = measured(ours)
print(json.dumps(found))
"""


def _run(script: str, folder: Path) -> dict[str, Any]:
    """Run a script next to the benchmark; return the JSON that it prints last."""
    file = folder / "script.py"
    # Triton reads a kernel's source from its file.
    file.write_text(script)
    paths = [str(ROOT / each) for each in ("benchmarks", "src", "kernels")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_host_cost_driver_counts_launches(tmp_path: Path) -> None:
    """Count launches of `JITFunction.run` and those of a compiled kernel that a caller has kept."""
    found = _run(COUNTED, tmp_path)
    assert found["first"] == {"copy_kernel": 1}
    assert found["kept"] == {"copy_kernel": 1}
    assert found["both"] == {"copy_kernel": 2}
    assert found["empty grid"] == {}
    assert found["norm"] == 1


@pytest.mark.full
def test_host_cost_seeded_launch_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = _run(SEEDED, tmp_path)
    plain = found["plain"]["forward"]
    seeded = found["seeded"]["forward"]
    assert plain["triton_launches"] > 0
    assert seeded["triton_launches"] == plain["triton_launches"] + 1
    assert seeded["torch_launches"] == plain["torch_launches"] + 3
    assert (
        found["seeded"]["backward"]["triton_launches"]
        == (found["plain"]["backward"]["triton_launches"])
    )
    assert found["transformers"]["forward"]["triton_launches"] == 0
    assert found["transformers"]["forward"]["torch_launches"] > 0
    assert found["plain"]["us"] > 0
