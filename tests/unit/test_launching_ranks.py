"""Starting ranks and watching them: what is left when that fails half-way."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from mtrain.config.compose.dump import run_yaml
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import BadEnvironment, MtrainError
from mtrain.launching import child_process, jobs, rank, start, torchrun
from mtrain.launching.environment import Place
from mtrain.launching.supervise import Supervisor
from tests.support.configs import LAPTOP, tiny


@pytest.mark.full
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        pytest.param(MemoryError(), marks=pytest.mark.full),
    ],
)
def test_launching_ranks_forked_are_ended_when_one_cannot_start(
    error: Exception, tmp_path: Path
) -> None:
    started: list[int] = []

    def fork(rank: int) -> int:
        if rank == 2:
            raise error
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10_000)
            os._exit(0)
        started.append(pid)
        return pid

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    if isinstance(error, OSError):
        expected = (BadEnvironment, "rank 2 of 4 could not be started")
    else:
        expected = (MemoryError, None)
    with pytest.raises(expected[0], match=expected[1]):
        Supervisor(tmp_path, "").start(fork, 4)
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


ALL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("names", "worker", "warned"),
    [
        (("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), True, False),
        (("RANK", "WORLD_SIZE"), None, False),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR"), None, False),
        (("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), False, True),
        (("RANK", "MASTER_ADDR", "MASTER_PORT"), False, True),
        (("WORLD_SIZE",), False, True),
        (("MASTER_ADDR", "MASTER_PORT"), False, False),
        ((), False, False),
    ],
)
def test_launching_ranks_exist_where_fully_described(
    names: tuple[str, ...], worker: bool | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ALL.items():
        monkeypatch.setenv(name, value if name in names else "")
    assert bool(torchrun.unused_variable()) == warned
    if worker is None:
        with pytest.raises(BadEnvironment) as refused:
            torchrun.here()
        assert all(name in str(refused.value) for name in ALL.keys() - set(names))
        monkeypatch.setenv("WORLD_SIZE", "1")  # one process needs no other
        worker = False
    assert (torchrun.here() is not None) == worker
    assert not torchrun.unused_variable() or warned


def test_launching_ranks_refuse_config_of_another_launcher(tmp_path: Path) -> None:
    run = resolve(tiny(), LAPTOP)
    start._describe(run, tmp_path, jobs.MASKS, tmp_path)
    assert start.read_start(tmp_path) == (jobs.MASKS, run.digest())
    (tmp_path / "run.yaml").write_text(run_yaml(resolve(tiny(trainer__seed=7), LAPTOP)))
    with pytest.raises(BadEnvironment, match="was changed after the run was started") as refused:
        rank.perform(tmp_path, tmp_path, tmp_path / "errors", 0)
    assert run.digest()[:12] in str(refused.value)


def test_launching_ranks_refuse_folder_without_launcher(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match=r"start\.json cannot be read: No such file"):
        rank.perform(tmp_path, tmp_path, tmp_path / "errors", 0)


def test_launching_ranks_refuse_differing_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run = resolve(tiny(cluster__device="cuda", trainer__deterministic=True), LAPTOP)
    start._describe(run, tmp_path, jobs.MASKS, tmp_path)
    with pytest.raises(
        BadEnvironment, match="CUBLAS_WORKSPACE_CONFIG is not in the environment of this rank"
    ):
        rank.perform(tmp_path, tmp_path, tmp_path / "errors", 0)


def test_launching_ranks_have_environment_without_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Place.here(1).home_filesystem == ""


def test_launching_ranks_work_next_to_threads_is_executed() -> None:
    run = resolve(tiny(kernels__cpu_matmul="blas"), LAPTOP)
    assert not start.has_threads()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert start.has_threads()
        assert not start.may_fork(run)
        work = child_process.ChildProcess("prepare", run, checkpoint=None)
        command: list[str] = []
        while not command:  # the process may be between its start and its program
            command = psutil.Process(work.pid).cmdline()
        assert work.result() is None
    finally:
        over.set()
        thread.join()
    assert "mtrain.launching.child_process" in command
    missing = run.model_copy(
        update={"data": run.data.model_copy(update={"kind": "indexed", "path": "nowhere"})}
    )
    with pytest.raises(MtrainError, match="nowhere"):
        child_process.ChildProcess("prepare", missing, checkpoint=None).result()
