"""State that no device of a cluster can hold, reported before anything starts, with the memory that
a device is compared with.
"""

from __future__ import annotations

import pytest

from mtrain.api import load
from mtrain.cli.check import summary
from mtrain.plan.rank import worst_stage
from mtrain.units import GIB
from tests.support.configs import LAPTOP
from tests.support.tables import tables

TABLES = tables("device_memory")

BASE = ["data=mock", "trainer.global_batch_size=64", "trainer.sample_tokens=0"]


@pytest.mark.parametrize(
    ("words", "fix"),
    TABLES["remedies"],
)
def test_device_memory_unfitting_state_warns_with_remedies(words: str, fix: str) -> None:
    found = [p for p in load([*BASE, *words.split()], LAPTOP, {}).warnings if p.code == "MT146"]
    assert [p.fix.startswith(fix) and p.severity == "warning" for p in found] == (
        [True] if fix else []
    )


def test_device_memory_fix_makes_the_whole_plan_fit() -> None:
    words = ["data=mock", "model=llama3_70b", "parallel=tp4pp4", "cluster=h100", "cluster.nodes=8"]
    kept = "parallel.recompute.granularity=none"
    found = load([*words, kept], LAPTOP, {}, to_run=False).warnings
    (problem,) = [p for p in found if p.code == "MT146"]
    run = load([*words, *problem.fix.split()], LAPTOP, {}, to_run=False).run
    assert worst_stage(run).peak <= (run.cluster.device_memory_gib or 0) * GIB


def test_device_memory_verdict_shows_facts_in_use() -> None:
    loaded = load(
        [*BASE, "model=llama3_8b", "parallel=dp", "cluster=h100x8", "precision=fp8_tensorwise"],
        LAPTOP,
        {},
    )
    text = summary(loaded)
    assert "bf16 with products in fp8 (tensorwise)" in text
    assert "device  sm_90, 80 GiB, MFU of 1979 TFLOP/s in fp8" in text
    assert "\n  device " not in summary(load(["cluster=cpu"], LAPTOP, {}))
