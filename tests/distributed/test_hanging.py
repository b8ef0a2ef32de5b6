"""Runs that hang: the straggler is reported, every rank leaves its stacks, and the run ends."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.faults.promises import Record, measured
from tests.support.commands import SMALL, metrics, wait_for
from tests.support.launched import Launched, as_rank, free_port
from tests.support.patience import slowness

RUN = (*SMALL, "cluster=cpu", "trainer.train_iters=100000", "log.name=run")
FAULT = 5


@dataclass(frozen=True)
class Limits:
    """The time limits of a run: as short as a machine allows on which a healthy rank must never
    reach them.
    """

    soft_s: float
    hard_s: float

    @property
    def words(self) -> tuple[str, str]:
        """Return the limits as command-line words."""
        return f"trainer.soft_timeout_s={self.soft_s}", f"trainer.timeout_s={self.hard_s}"


@pytest.fixture
def limits() -> Limits:
    factor = slowness()
    return Limits(1.5 * factor, 3.0 * factor)


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    """Provide a list for processes, which do not outlive the test."""
    launched: list[Launched] = []
    yield launched
    for one in launched:
        one.kill()


def holding(rank: int, forwards: int, hold: Callable[[], object]) -> Callable[[], None]:
    """Return a patch that has `rank` call `hold` within its forward number `forwards`."""

    def patch() -> None:
        from mtrain.train.loop import step

        real = step.forward_step
        done = []

        def held(objective: object, batches: Iterator[object], model: object) -> object:
            done.append(None)
            held_back = late(batches) if len(done) == forwards else batches
            return real(objective, held_back, model)  # type: ignore[arg-type]

        def late(batches: Iterator[object]) -> Iterator[object]:
            if os.environ["RANK"] == str(rank):
                hold()
            yield next(batches)

        step.forward_step = held  # type: ignore[assignment]

    return patch


def sleep() -> None:
    time.sleep(10_000)  # the line that holds everybody up


def listen() -> None:
    """Wait for what rank 0 never sends."""
    torch.distributed.recv(torch.zeros(1), src=0)


def noted(folder: Path, hold: Callable[[], object]) -> Callable[[], object]:
    """Return `hold`, which leaves the time of its beginning."""

    def held() -> object:
        (folder / "held").touch()
        return hold()

    return held


def ended_in_time(folder: Path, limits: Limits, record: Record) -> None:
    """Require that a run has just ended, within 5 s of the time limit of its hang."""
    over_s = time.time() - (folder / "held").stat().st_mtime - limits.hard_s
    measured(record, hang_s=over_s)
    assert over_s < 5 * slowness()


def gather_instead() -> None:
    """Gather in the tensor-parallel group, where the other ranks reduce."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.zeros(8, 32, 64) for _ in range(group.size())]
    torch.distributed.all_gather(parts, parts[0], group=group)


def reduce_less() -> None:
    """Reduce half of the numbers that the other ranks reduce."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(torch.zeros(4, 32, 64), group=group)


def stacks(folder: Path, rank: int) -> str:
    path = folder / f"runs/run/errors/stacks_rank_{rank:05d}.txt"
    return path.read_text() if path.exists() else ""


def end_of(launched: Launched, ranks: list[psutil.Process]) -> str:
    """Return the output of a run that must end with a fault; none of its ranks is left."""
    assert launched.wait() == FAULT, launched.said
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert "Traceback" not in launched.said
    return launched.said


@pytest.mark.full
def test_hanging_sleeping_rank_is_named_with_all_stacks(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    cases = (("tp2", 1), ("pp2", 0))
    for layout, sleeper in cases:
        (tmp_path / layout).mkdir()
        patch = holding(sleeper, 12, sleep)
        started.append(
            Launched(*RUN, *limits.words, f"parallel={layout}", cwd=tmp_path / layout, patch=patch)
        )
    everyone = []
    for run, (layout, _) in zip(started, cases, strict=True):
        wait_for(lambda layout=layout: len(metrics(tmp_path / layout / "runs/run")) > 0)  # type: ignore[misc]
        everyone.append(run.ranks())
    for run, (layout, sleeper), ranks in zip(started, cases, everyone, strict=True):
        wait_for(lambda run=run: "warning: no progress" in run.said)  # type: ignore[misc]
        said = end_of(run, ranks)
        who = (
            rf"rank {sleeper} \(.*, process {ranks[sleeper].pid}\) is behind, in step \d+, forward"
        )
        named = rf"{who}, at test_hanging.py:\d+ in sleep"
        assert len(re.findall(rf"warning: no progress for [\d.]+ s .*{named}", said)) == 1, said
        assert len(re.findall(rf"^rank \d: no progress for [\d.]+ s .*{named}", said, re.M)) == 1, (
            said
        )
        assert "checkpoint.resume" not in said  # nothing was saved
        lacks = (
            r"it has not launched collective \d+ of TENSOR_MODEL_PARALLEL_GROUP, in which rank 0"
            r" waits"
        )
        assert bool(re.search(lacks, said)) == (layout == "tp2"), said
        home = tmp_path / layout
        assert "time.sleep(10_000)  # the line that holds everybody up" in stacks(home, sleeper)
        waiting = "distributed_c10d.py" if layout == "tp2" else "p2p_communication.py"
        assert waiting in stacks(home, 1 - sleeper)


@pytest.mark.full
def test_hanging_stopped_rank_is_named(
    tmp_path: Path, started: list[Launched], limits: Limits, record_property: Record
) -> None:
    # four ranks are slow to show signs
    patient = replace(limits, soft_s=limits.hard_s, hard_s=2 * limits.hard_s)
    homes = [tmp_path / "0", tmp_path / "1"]
    for home in homes:
        home.mkdir()
        started.append(Launched(*RUN, *patient.words, "parallel=tp2", cwd=home))
    ranks = []
    begun = []
    for stopped, run in enumerate(started):
        wait_for(lambda stopped=stopped: len(metrics(homes[stopped] / "runs/run")) > 3)  # type: ignore[misc]
        ranks.append(run.ranks())
        # until each rank has shown signs of life: it does so 20 times in soft_s
        time.sleep(patient.soft_s / 5)
        ranks[stopped][stopped].send_signal(signal.SIGSTOP)
        begun.append(time.monotonic() - run.began)
    for stopped, run in enumerate(started):
        said = end_of(run, ranks[stopped])
        assert run.seconds > patient.hard_s
        over_s = run.seconds - begun[stopped] - patient.hard_s
        measured(record_property, stopped_s=over_s)
        assert over_s < 5 * slowness()
        last = r"; ranks? [01][^;]* (in|after) \w+ #\d+ of \w+ [^;]*; stacks: "
        assert re.search(rf"rank {1 - stopped}: no progress .*{last}", said), said
        kept = homes[stopped] / f"runs/run/errors/collectives_rank_0000{stopped}.txt"
        assert len(kept.read_text().splitlines()) == 64
        assert ("pip install 'mtrain[debug]'" in said) == (shutil.which("py-spy") is None)
        assert (
            len(re.findall(rf"warning: no progress .*: rank {stopped} .* no sign of life", said))
            == 1
        ), said
        assert re.search(
            rf"rank {1 - stopped}: no progress .*: rank {stopped} .* no sign of life", said
        ), said
        assert stacks(homes[stopped], 1 - stopped)


def test_hanging_rank_missing_a_collective_is_named(
    tmp_path: Path, started: list[Launched], limits: Limits, record_property: Record
) -> None:
    patch = holding(1, 4, noted(tmp_path, listen))
    run = Launched(*RUN, *limits.words, "parallel=tp2", cwd=tmp_path, patch=patch)
    started.append(run)
    said = end_of(run, [])
    ended_in_time(tmp_path, limits, record_property)
    where = (
        r"; rank 0 is in all_reduce #\d+ of tp \(float32 \[8, 32, 64\]\),"
        r" rank 1 is in recv #1 of world from rank 0 \(float32 \[1\]\); stacks"
    )
    assert len(re.findall(where, said)) == 2, said
    named = (
        r"rank 1 \(.*\) is behind, .*; it has not launched collective \d+ of"
        r" TENSOR_MODEL_PARALLEL_GROUP"
    )
    assert re.search(rf"rank \d: no progress .*{named}, in which rank 0 waits", said), said
    lines = (tmp_path / "runs/run/errors/collectives_rank_00001.txt").read_text().splitlines()
    assert lines[-1] == "recv #1 of world from rank 0 (float32 [1]), waited for"


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "instead", "operations"),
    [
        ("tp2", gather_instead, ("all_gather", "all_reduce")),
        ("tp4", gather_instead, ("all_gather", "all_reduce")),
        ("tp4", reduce_less, ("all_reduce", "all_reduce")),
    ],
)
def test_hanging_ranks_that_disagree_are_named(
    layout: str,
    instead: Callable[[], None],
    operations: tuple[str, str],
    tmp_path: Path,
    started: list[Launched],
    limits: Limits,
) -> None:
    words = (*RUN, *limits.words, f"parallel={layout}")
    started.append(Launched(*words, cwd=tmp_path, patch=holding(1, 4, instead)))
    assert started[0].wait() == FAULT
    said = started[0].said
    others = "rank 0" if layout == "tp2" else "the others"
    odd, usual = operations
    made = rf"(?:;|collectives:) rank 1 made {odd} #(\d+) of tp .*"
    names = rf"{made}, {others} {usual} #\1 of tp .*\[8, 32, 64\]"
    # gloo aborts where sizes differ, and waits where operations do
    count = 1 if instead is reduce_less else 2
    assert len(re.findall(names, said)) == count, said


@pytest.mark.full
def test_hanging_rank_holding_gil_leaves_stacks(
    tmp_path: Path, started: list[Launched], limits: Limits, record_property: Record
) -> None:
    hold = lambda: ctypes.PyDLL(None).sleep(10_000)  # noqa: E731
    patch = holding(1, 6, noted(tmp_path, hold))
    run = Launched(*RUN, *limits.words, "parallel=tp2", cwd=tmp_path, patch=patch)
    started.append(run)
    said = end_of(run, [])
    ended_in_time(tmp_path, limits, record_property)
    assert re.search(r"no progress .*: rank 1 .* no sign of life", said), said
    assert "Timeout" in stacks(tmp_path, 1)
    assert "test_hanging.py" in stacks(tmp_path, 1)


@pytest.mark.full
def test_hanging_ranks_of_another_launcher_end(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    words = (*RUN, *limits.words, "parallel=tp2")
    port = free_port()
    for rank in (0, 1):
        environment = as_rank(rank, 2, port, LOCAL_RANK=str(rank))
        patch = holding(1, 6, sleep)
        started.append(Launched(*words, cwd=tmp_path, environment=environment, patch=patch))
    assert [one.wait() for one in started] == [FAULT, FAULT], started[0].said
    said = started[0].said + started[1].said
    assert len(re.findall(r"warning: no progress for .* rank 1 .* is behind", said)) == 1, said
    assert re.search(r"rank 0: no progress for .* rank 1 .* is behind", said), said
    assert "# the line that holds everybody up" in stacks(tmp_path, 1)


@pytest.mark.full
def test_hanging_slow_healthy_run_reports_nothing(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    def slowly() -> None:
        from mtrain.ckpt import index
        from mtrain.train.loop import trainer
        from mtrain.world.heartbeat import tick

        step = trainer.train_step
        merge = index.merged

        def slow_step(*args: object, **kwargs: object) -> object:
            time.sleep(limits.soft_s / 5)
            return step(*args, **kwargs)  # type: ignore[arg-type]

        # only on rank 0, while the others wait
        def long_merge(*args: object, **more: object) -> object:
            for _ in range(20):
                time.sleep(1.2 * limits.hard_s / 20)
                tick()
            return merge(*args, **more)  # type: ignore[arg-type]

        # type: ignore[assignment]
        trainer.train_step = slow_step
        index.merged = long_merge

    words = (
        *limits.words,
        "trainer.train_iters=8",
        "trainer.eval_iters=2",
        "trainer.eval_interval=4",
    )
    run = Launched(*RUN, "parallel=tp2", *words, cwd=tmp_path, patch=slowly)
    started.append(run)
    assert run.wait() == 0, run.said
    assert run.seconds > limits.hard_s + 8 * limits.soft_s / 5
    assert "warning" not in run.said
    assert not (tmp_path / "runs/run/errors").exists()


@pytest.mark.full
def test_hanging_slow_disk_is_awaited(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    def slowly() -> None:
        sync = os.fsync

        def slow_sync(descriptor: int) -> None:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.endswith(".safetensors") and os.environ["RANK"] == "1":
                time.sleep(1.3 * limits.hard_s)
            sync(descriptor)

        os.fsync = slow_sync

    run = Launched(
        *RUN, *limits.words, "parallel=tp2", "trainer.train_iters=1", cwd=tmp_path, patch=slowly
    )
    started.append(run)
    assert run.wait() == 0, run.said
    assert run.seconds > limits.hard_s
    assert "no progress" not in run.said


@pytest.mark.full
def test_hanging_transient_stall_is_reported_once(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    words = (*replace(limits, hard_s=20 * limits.hard_s).words, "trainer.train_iters=8")
    patch = holding(1, 4, lambda: time.sleep(2 * limits.soft_s))
    run = Launched(*RUN, "parallel=tp2", *words, cwd=tmp_path, patch=patch)
    started.append(run)
    assert run.wait() == 0, run.said
    assert run.said.count("warning: no progress") == 1
    assert re.search(
        r"rank 1 .* it has not launched collective \d+ of TENSOR_MODEL_PARALLEL_GROUP, in which"
        r" rank 0",
        run.said,
    )
    recorded = [
        json.loads((tmp_path / f"runs/run/errors/flight_rank_0000{rank}.json").read_text())
        for rank in (0, 1)
    ]
    last = [max(entry["collective_seq_id"] for entry in dump["entries"]) for dump in recorded]
    assert last[0] == last[1] + 1


@pytest.mark.full
def test_hanging_suspended_run_continues(
    tmp_path: Path, started: list[Launched], limits: Limits
) -> None:
    run = Launched(*RUN, *limits.words, "parallel=tp2", "log.progress=none", cwd=tmp_path)
    started.append(run)
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 3)
    ranks = run.ranks()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            rank.send_signal(number)
        time.sleep(limits.hard_s + 0.5 if number == signal.SIGSTOP else 0)
    steps = len(metrics(tmp_path / "runs/run"))
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > steps + 20)
    assert run.said == ""
