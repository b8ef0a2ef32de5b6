"""Binaries compiled ahead of their launches: those that the launches look up, each compiled once.

Each test runs in a process of its own, where kernels are compiled for sm_90 and not interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import fcntl, os, threading, time
from dataclasses import replace
from pathlib import Path

import pytest
import torch, triton
plain = torch.empty, torch.empty_like, torch.Tensor.new_empty
import host_cost_driver
host_cost_driver.install()
host_cost_driver.allocate(*plain)
from mtrain_kernels import compilations
from mtrain_kernels.compilations import Launch, compile_ahead, listing, recorded
from mtrain_kernels.activation.triton import forward, forward_kernel

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
cache = Path(os.environ["TRITON_CACHE_DIR"])

def activate(device):
    for dtype in (torch.bfloat16, torch.float32):
        forward(torch.zeros(4, 256, dtype=dtype, device=device), None, "swiglu", 1.0, 0.0)
"""


def _runs(tmp_path: Path, script: str) -> None:
    """Run a script with an empty cache; it fails by its own assertions."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + script)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_compilations_ahead_are_found_by_launches(tmp_path: Path) -> None:
    _runs(
        tmp_path,
        """
with listing(90) as needed:
    activate("meta")
listed = needed()
assert len(listed) == 2 and not recorded() and not hits, listed
others = [replace(listed[0], data=listed[0].data[:99]), replace(listed[0], kernel="os.fork")]
counts = compile_ahead([*others, *listed], 90, 2)
assert counts == {"compiled": 2, "cached": 0, "busy": 0, "failed": 2}, counts
activate("cpu")
assert hits == [True, True], hits
assert [(one.kernel, one.data) for one in recorded()] == [(x.kernel, x.data) for x in listed]
assert all(one.cached(cache) for one in recorded())
assert not replace(recorded()[0], binary="A" * 52).cached(cache)
assert compile_ahead(recorded(), 90, 1)["cached"] == 2
""",
    )


@pytest.mark.full
def test_compilations_one_process_compiles_a_binary(tmp_path: Path) -> None:
    _runs(
        tmp_path,
        """
taken = []
real = compilations._take
def take(descriptor):
    taken.append(os.dup(descriptor))
    real(descriptor)
compilations._take = take
activate("cpu")
compilations._take = real
assert hits == [False, False], hits
# A copy of its descriptor keeps a lock: processes leave that binary, and launches wait for it.
fcntl.flock(taken[1], fcntl.LOCK_UN)
assert compile_ahead(recorded(), 90, 1) == {"compiled": 0, "cached": 1, "busy": 1, "failed": 0}
begun = time.monotonic()
threading.Timer(0.3, fcntl.flock, (taken[0], fcntl.LOCK_UN)).start()
forward_kernel.device_caches.clear()
forward_kernel._known.clear()
activate("cpu")
assert hits == [False, False, True, True], hits
assert time.monotonic() - begun >= 0.3
""",
    )
