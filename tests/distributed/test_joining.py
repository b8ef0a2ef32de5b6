"""The rendezvous of ranks: every rank names the absent ones, the duplicates and the differences."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.schema.run import RunConfig
from mtrain.world.rank_env import End
from tests.support.commands import SMALL, metrics, wait_for
from tests.support.launched import Launched, as_rank, free_port
from tests.support.patience import patient

RUN = (
    *SMALL,
    "cluster=cpu",
    "trainer.train_iters=2",
    "log.name=run",
    "trainer.global_batch_size=12",
)
ENVIRONMENT = 3


def soon() -> str:
    """Return a join limit that ranks started together keep, and that a test can wait for."""
    return f"trainer.join_timeout_s={patient(2)}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Return a function that starts a rank of `parallel=dp`; no rank outlives the test."""
    port = free_port()
    started = []

    def one(
        rank: int, size: int, *words: str, patch: Callable[[], None] | None = None, **more: str
    ) -> Launched:
        environment = as_rank(rank, size, port, **more)
        said = {word.partition("=")[0] for word in words}
        usual = [word for word in RUN if word.partition("=")[0] not in said]
        started.append(
            Launched(
                *usual, "parallel=dp", *words, cwd=tmp_path, environment=environment, patch=patch
            )
        )
        return started[-1]

    yield one
    for launched in started:
        launched.kill()


def test_joining_agreeing_ranks_train(start: Callable[..., Launched], tmp_path: Path) -> None:
    ranks = [start(0, 2), start(1, 2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said + ranks[1].said
    assert len(metrics(tmp_path / "runs/run")) == 2
    records = [
        tmp_path / "runs/run" / name / "run.yaml" for name in ("", "checkpoints/step_00000002")
    ]
    began, saved = (read_run_file(record).kernels.cpu_matmul for record in records)
    assert began == saved in ("blas", "onednn"), (
        "a run goes on with the library of products that it began with"
    )


def test_joining_rank_0_prints_warnings(start: Callable[..., Launched]) -> None:
    words = ("checkpoint.save_final=false", "checkpoint.save_interval=100")
    ranks = [start(rank, 2, *words) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said + ranks[1].said
    assert [rank.said.count("warning[MT435]") for rank in ranks] == [1, 0]


def _little_memory() -> None:
    from mtrain.config.resolve.resolution import Machine

    Machine.here = classmethod(lambda cls, *_: cls(cpu_cores=2, memory_bytes=1 << 20))  # type: ignore[method-assign,assignment]


def test_joining_small_machine_is_refused_for_all(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    first = start(0, 2, patch=_little_memory, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    second = start(1, 2, patch=_little_memory, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert [first.wait(), second.wait()] == [ENVIRONMENT, ENVIRONMENT], first.said + second.said
    assert "of memory for weights" in first.said
    assert "on 2 ranks" in first.said
    assert "Traceback" not in first.said + second.said
    assert not (tmp_path / "runs").exists()


def test_joining_absent_ranks_are_named(start: Callable[..., Launched], tmp_path: Path) -> None:
    limit_s = patient(2)
    ranks = [start(rank, 4, f"trainer.join_timeout_s={limit_s}") for rank in (0, 2)]
    for rank in ranks:
        assert rank.wait() == ENVIRONMENT, rank.said
        assert (
            f"ranks 1 and 3 of 4 did not arrive within {limit_s} s; arrived: 0, 2 on" in rank.said
        )
        assert f"trainer.join_timeout_s={10 * limit_s}" in rank.said
        assert "Traceback" not in rank.said
        assert rank.seconds > limit_s
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_joining_absent_rank_0_is_named(start: Callable[..., Launched]) -> None:
    rank = start(1, 2, "trainer.join_timeout_s=2")
    assert rank.wait() == ENVIRONMENT
    assert "rank 1: rank 0 at 127.0.0.1:" in rank.said
    assert "did not answer within 2 s: Connection refused" in rank.said


@pytest.mark.full
def test_joining_absent_rank_0_of_launcher_store_is_named(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = (*RUN, "parallel=dp", soon())
    ranks = [
        Launched(*words, cwd=tmp_path, environment=as_rank(r, 3, store.port, **AGENT))
        for r in (1, 2)
    ]
    for rank in ranks:
        assert rank.wait() == ENVIRONMENT
        assert re.search(r"rank 0 of 3 did not arrive within \d+ s; arrived: 1, 2 on", rank.said), (
            rank.said
        )


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.full
def test_joining_stale_store_keys_are_ignored(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int, size: int, name: str, restarts: str) -> Launched:
        environment = as_rank(
            rank, size, store.port, **AGENT | {"TORCHELASTIC_RESTART_COUNT": restarts}
        )
        return Launched(
            *RUN, "parallel=dp", word, f"log.name={name}", cwd=tmp_path, environment=environment
        )

    word = soon()
    for name, sizes, code in (("a", (2, 2), 0), ("b", (2,), ENVIRONMENT), ("c", (2, 2), 0)):
        # Machines count restarts differently: one that failed counts its own, the others do not.
        ranks = [start(rank, size, name, str(rank)) for rank, size in enumerate(sizes)]
        assert [rank.wait() for rank in ranks] == [code] * len(ranks), (
            ranks[0].said + ranks[-1].said
        )


def test_joining_differing_keys_are_named(start: Callable[..., Launched]) -> None:
    ranks = [start(0, 2), start(1, 2, "optim.lr=0.5", "trainer.seed=7")]
    for rank in ranks:
        assert rank.wait() == ENVIRONMENT
        assert "ranks [1] differ from rank 0 in version or configuration" in rank.said
        assert "optim.lr: 0.5 on rank 1 (" in rank.said
        assert "trainer.seed: 7 on rank 1 (" in rank.said
        assert "1234 on rank 0 (" in rank.said
        assert "train_iters" not in rank.said


def test_joining_differing_version_is_named(start: Callable[..., Launched]) -> None:
    import mtrain

    def other_version() -> None:
        mtrain.__version__ = "9.9"

    ranks = [start(0, 2), start(1, 2, patch=other_version)]
    assert [rank.wait() for rank in ranks] == [ENVIRONMENT] * 2
    assert "mtrain: 9.9 on rank 1 (" in ranks[0].said


def test_joining_differing_world_size_is_named(start: Callable[..., Launched]) -> None:
    ranks = [start(0, 2), start(1, 4)]
    for rank in ranks:
        assert rank.wait() == ENVIRONMENT
        assert "WORLD_SIZE differs: 2 on rank 0 (" in rank.said
        assert "4 on rank 1 (" in rank.said


def test_joining_refused_rank_informs_others(
    start: Callable[..., Launched],
) -> None:
    ranks = [start(0, 2), start(1, 2, "optim.lr=-1")]
    assert [rank.wait() for rank in ranks] == [ENVIRONMENT, 2]
    assert "rank 1 (" in ranks[0].said
    assert "ended before it was ready" in ranks[0].said
    assert "optim.lr" in ranks[0].said


def test_joining_refused_rank_0_informs_others(
    start: Callable[..., Launched],
) -> None:
    ranks = [start(0, 2, "optim.lr=-1"), start(1, 2)]
    assert [rank.wait() for rank in ranks] == [2, ENVIRONMENT]
    assert "rank 0 (" in ranks[1].said
    assert "optim.lr" in ranks[1].said


@pytest.mark.parametrize("twice", [0, pytest.param(1, marks=pytest.mark.full)])
def test_joining_duplicate_rank_is_named(start: Callable[..., Launched], twice: int) -> None:
    word = soon()
    ranks = [start(rank, 3, word) for rank in (twice, twice, 1 - twice)]
    assert [rank.wait() for rank in ranks] == [ENVIRONMENT] * 3
    for rank in ranks:
        assert f"RANK {twice} came twice: " in rank.said
        assert f"process {ranks[0].pid}" in rank.said
        assert f"process {ranks[1].pid}" in rank.said


@pytest.mark.full
@pytest.mark.parametrize("twice", [0, pytest.param(1, marks=pytest.mark.full)])
def test_joining_late_duplicate_ends_by_itself(
    start: Callable[..., Launched], tmp_path: Path, twice: int
) -> None:
    ranks = [start(rank, 2, "trainer.train_iters=100000", "log.progress=none") for rank in (0, 1)]
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 2)
    second = start(twice, 2, "trainer.train_iters=100000", "log.progress=none", soon())
    assert second.wait() == ENVIRONMENT
    assert f"rank {1 - twice} of 2 did not arrive" in second.said
    assert (
        "note: ranks started on this store before; if they still run, RANK is given twice"
        in second.said
    )
    steps = len(metrics(tmp_path / "runs/run"))
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > steps + 2)
    assert "warning" not in ranks[0].said + ranks[1].said


@pytest.mark.full
def test_joining_importing_rank_is_awaited(start: Callable[..., Launched]) -> None:
    limit_s = patient(2)

    def slow() -> None:
        from mtrain import mcore

        real = mcore.install

        def late(*args: object) -> None:
            time.sleep(1.2 * limit_s)
            real(*args)  # type: ignore[arg-type]

        mcore.install = late  # type: ignore[assignment]

    word = f"trainer.join_timeout_s={limit_s}"
    ranks = [start(0, 2, word), start(1, 2, word, patch=slow)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said


def test_joining_refused_rank_ends_during_import(
    start: Callable[..., Launched],
) -> None:
    def stuck() -> None:
        from mtrain import mcore

        mcore.install = lambda *_: time.sleep(1000)  # type: ignore[assignment,misc]

    ranks = [start(0, 2, patch=stuck), start(1, 2, "trainer.seed=7", patch=stuck)]
    for rank in ranks:
        assert rank.wait() == ENVIRONMENT
        assert "trainer.seed: 7 on rank 1" in rank.said


@pytest.mark.full
def test_joining_unready_rank_is_named(start: Callable[..., Launched]) -> None:
    def hasty() -> None:
        from mtrain.world import join, rendezvous

        join.IMPORT_FACTOR = rendezvous.IMPORT_FACTOR = 1

    def stuck() -> None:
        from mtrain import mcore

        hasty()
        mcore.install = lambda *_: time.sleep(1000)  # type: ignore[assignment,misc]

    limit_s = patient(2)
    word = f"trainer.join_timeout_s={limit_s}"
    ranks = [start(0, 2, word, patch=hasty), start(1, 2, word, patch=stuck)]
    assert ranks[0].wait() == ENVIRONMENT
    assert "rank 1 (" in ranks[0].said
    assert f"arrived, but was not ready within {limit_s} s" in ranks[0].said


@pytest.mark.full
def test_joining_stopped_rank_0_is_reported(start: Callable[..., Launched]) -> None:
    def stop_when_it_serves() -> None:
        from mtrain.world import rendezvous

        rendezvous.Coordinator.look = lambda self: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]

    limit_s = patient(2)
    word = f"trainer.join_timeout_s={limit_s}"
    start(0, 2, word, patch=stop_when_it_serves)
    rank = start(1, 2, word)
    assert rank.wait() == ENVIRONMENT
    assert "rank 0 at 127.0.0.1:" in rank.said
    assert f"did not answer within {limit_s} s" in rank.said


@pytest.mark.full
def test_joining_foreign_port_owner_is_reported(
    start: Callable[..., Launched], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].recv(1), daemon=True).start()
        environment = as_rank(0, 2, other.getsockname()[1])
        rank = Launched(*RUN, "parallel=dp", soon(), cwd=tmp_path, environment=environment)
        assert rank.wait() == ENVIRONMENT
        assert f"port {environment['MASTER_PORT']} of this machine: Address already" in rank.said
        # A run that starts its own ranks takes a free port, whatever others left in its variables.
        words = (*RUN, "parallel=dp2", "trainer.train_iters=1")
        own = Launched(
            *words, cwd=tmp_path, environment={"MASTER_PORT": environment["MASTER_PORT"]}
        )
        assert own.wait() == 0, own.said


@pytest.mark.full
def test_joining_absent_local_rank_is_named(tmp_path: Path) -> None:
    def stop_rank_1() -> None:
        from mtrain.launching import jobs

        real = jobs.enter

        def stopped(run: RunConfig, ending: End) -> None:
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGSTOP)
            real(run, ending)

        jobs.enter = stopped

    limit_s = patient(2)
    words = (*RUN, "parallel=tp2", f"trainer.join_timeout_s={limit_s}")
    run = Launched(*words, cwd=tmp_path, patch=stop_rank_1)
    try:
        wait_for(lambda: len(run.ranks()) == 2)
        ranks = run.ranks()
        assert run.wait() == ENVIRONMENT
    finally:
        run.kill()
    assert run.said.count(f"rank 1 of 2 did not arrive within {limit_s} s") == 1
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
