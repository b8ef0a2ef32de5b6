"""Ranks that are slower than others: named, with a run that goes on or ends to be placed elsewhere,
and never because the machine is loaded.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.devices.cpu import CPU
from mtrain.world import own_time
from mtrain.world.own_time import OwnTime, slow
from tests.support.commands import SMALL, metrics
from tests.support.launched import mtrain

RUN = (*SMALL, "cluster=cpu", "log.name=run", "log.progress=none")
NAMED = re.compile(
    r"warning: step (\d+): rank (\d) on (\S+) \(cpu\) is slow: its own work took [\d.]+ ms a step,"
    r" ([\d.]+) x the median of its pipeline stage"
)


@pytest.fixture
def loaded() -> Iterator[None]:
    """Keep both cores busy with processes that always have work."""
    pids = []
    for _ in range(3 * (os.cpu_count() or 1)):
        pid = os.fork()
        if pid == 0:
            while os.getppid() != 1:
                sum(range(10_000))
            os._exit(0)
        pids.append(pid)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_stragglers_slowed_rank_is_named_and_ends_the_run(tmp_path: Path) -> None:
    words = ("parallel=dp2", "trainer.train_iters=40", "resilience.on_straggler=restart")
    done = mtrain(
        *RUN, *words, "resilience.straggler_interval=4", "--inject", "slow@3:1", cwd=tmp_path
    )
    assert done.returncode == 75, done.stderr
    ((step, rank, _, ratio),) = NAMED.findall(done.stderr)
    assert (rank, step) == ("1", "16")
    assert 2.2 < float(ratio) < 4
    steps = [line["step"] for line in metrics(tmp_path / "runs/run")]
    assert steps[-1] <= 3 + 20
    assert all(0 < line["own_s"] <= line["step_s"] for line in metrics(tmp_path / "runs/run"))
    assert (tmp_path / f"runs/run/checkpoints/step_{steps[-1]:08d}/manifest.json").exists()


@pytest.mark.full
def test_stragglers_are_named_again_after_a_restart(tmp_path: Path) -> None:
    words = (
        "parallel=tp2pp2",
        "trainer.train_iters=36",
        "checkpoint.save_interval=18",
        "resilience.straggler_interval=4",
    )
    faults = "slow@1:2,kill@20:0"
    done = mtrain(*RUN, *words, "--restarts", "1", "--inject", faults, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [(int(step), rank) for step, rank, *_ in NAMED.findall(done.stderr)]
    assert [rank for _, rank in found] == ["2", "2"], done.stderr
    assert found[0][0] <= 16
    assert 18 < found[1][0] <= 32


@pytest.mark.full
def test_stragglers_equal_ranks_under_load_are_not_named(tmp_path: Path, loaded: None) -> None:
    words = ("parallel=dp4", "trainer.train_iters=60", "resilience.straggler_interval=2")
    done = mtrain(*RUN, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is slow" not in done.stderr


@pytest.mark.parametrize(
    ("own_s", "found"),
    [
        ((1.0, 3.0), [1]),
        ((1.0, 1.4, 1.2, 1.0), []),
        ((2.0, 1.0, 1.1, 1.0), [0]),
        ((9.0, 9.0, 9.5, 9.2), []),
        ((5.0,), []),
        ((0.0, 1.0), []),
    ],
)
def test_stragglers_exceed_ratio_of_median(own_s: tuple[float, ...], found: list[int]) -> None:
    assert [one.rank for one in slow(dict(enumerate(own_s)), 1.5)] == found


def test_stragglers_own_time_has_no_waits_for_ranks() -> None:
    begun = time.perf_counter()
    own = OwnTime(CPU)
    time.sleep(0.02)  # as for a disk
    paused = OwnTime.pause()
    time.sleep(0.2)
    OwnTime.resume(paused)
    own.stop()
    step_s = time.perf_counter() - begun
    assert step_s > 0.22
    assert 0.015 < own.seconds(step_s) < 0.15
    assert OwnTime.pause() is None


def test_stragglers_own_time_leaves_out_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = iter([(1.0, 5.0), (1.2, 8.0)])
    monkeypatch.setattr(own_time, "_scheduled", lambda: next(scheduled))
    own = OwnTime(CPU)
    own.stop()
    assert own.seconds(4.0) == pytest.approx(1.0)
    assert own.seconds(3.1) == pytest.approx(0.2)  # never less than the time on a core


def test_stragglers_own_time_of_a_device_is_that_of_its_events() -> None:
    # In a step of 200 ms, the stream waits for 30 and then for 50 ms.
    times = iter([10.0, 40.0, 100.0, 150.0])

    def event() -> SimpleNamespace:
        at = next(times)
        return SimpleNamespace(at=at, elapsed_time=lambda end: end.at - at)

    own = OwnTime(SimpleNamespace(event=event, runs_ahead=True))
    for _ in range(2):
        OwnTime.resume(OwnTime.pause())
    own.stop()
    assert own.seconds(0.2) == pytest.approx(0.12)
