"""The planned cost of `log.statistics`."""

from __future__ import annotations

import pytest

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.plan.count import parameters
from mtrain.plan.time.described import READS, described_seconds
from mtrain.plan.time.device import device_of
from mtrain.plan.time.efficiencies import reached_by
from mtrain.plan.time.report import time_report
from tests.support.covering import some

BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
ONE = "model=llama3_8b parallel=dp8"
SHAPES = [
    "model=llama3_8b parallel=dp8",
    "model=llama3_8b parallel=dp8 trainer.global_batch_size=8",
    "model=llama3_8b parallel=tp2 parallel.ranks=8",
    "model=llama3_8b parallel=cp2 parallel.ranks=8 parallel.cp_comm_type=p2p",
    "model=llama3_8b parallel=pp2 parallel.ranks=8",
]


def run_of(words: str) -> RunConfig:
    return load(["cluster=h100", *words.split()], BIG, {}, to_run=False).run


@pytest.mark.parametrize("shape", some(SHAPES, SHAPES[:1]))
def test_plan_described_cost_of_8b_is_within_bounds(shape: str) -> None:
    for interval, most in ((10, 0.03), (100, 0.01)):
        run = run_of(f"{shape} log.statistics.interval={interval}")
        found = time_report(run, 0)["statistics"]
        assert 1e-5 < found["share"] < most
        expected = found["described_s"] / interval / time_report(run, 0)["step_s"]
        assert found["share"] == pytest.approx(expected)


def test_plan_described_weights_are_read_by_their_owner() -> None:
    words = f"{ONE} log.statistics.interval=10 log.statistics.kinds=[gradients]"
    run = run_of(f"{words} parallel.distributed_optimizer=true")
    device = device_of(run.cluster)
    reached = reached_by(run.cluster)
    moved = parameters(run.model) / 8 * READS * 4
    expected = moved / (device.memory * reached.memory) / reached.speed
    assert described_seconds(run) == pytest.approx(expected, rel=0.01)
    whole = run_of(f"{words} parallel.distributed_optimizer=false")
    assert described_seconds(whole) == pytest.approx(8 * expected, rel=0.01)


def test_plan_described_is_shown_only_where_it_is_on() -> None:
    assert time_report(run_of(ONE), 0)["statistics"] is None
