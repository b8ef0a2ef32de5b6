"""The lengths of prompts share the kernels of a prefill.

Triton compiles for kinds of numbers: 1, multiples of 16, and others; and mtrain's kernels have few
sizes of tiles. So a few prompts compile what prompts of any length need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
FIRST = (5, 9, 16, 17, 32)
"""Multiples of 16 and other lengths, each on both sides of the smallest tiles."""
OTHERS = (6, 7, 11, 13, 21, 27, 31, 33, 45, 48, 50, 63, 64, 65, 77, 96, 100, 112, 127, 128)
SCRIPT = """
import json, sys

sys.path.insert(0, "benchmarks")
import host_cost

host_cost.prepare()
import torch
import triton
from mtrain.api import load
from mtrain.assembly.model import build_model
from mtrain.train.generate.request import Sampling
from mtrain.train.generate.sampler import Sampler
from mtrain.world.init import joined

words = ["model=llama_tiny", "model.num_layers=2", "parallel=single", "data=mock", "cluster=cpu"]
run = load([*words, "data.seq_length=256", "kernels=triton"]).run
seen = []
triton.knobs.compilation.listener = lambda *, src, **_: seen.append(src.name)
found = []
with joined(run) as world:
    sampler = Sampler(run, world, build_model(run, world, wrap=False))
    for length in json.loads(sys.argv[1]):
        before = len(seen)
        sampler.continued([list(range(length))], Sampling(2, temperature=0))
        found.append(len(seen) - before)
print(json.dumps(found))
"""


@pytest.mark.full
def test_prefill_of_other_lengths_compiles_nothing() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lengths = [*FIRST, *OTHERS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(lengths)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(lengths, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert found[FIRST[0]] > 5, found
    assert not any(found[length] for length in OTHERS), found
