"""The same run through each entrance: forked, executed, as tasks of srun or torchrun; all end with
the same bits.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from mtrain.ckpt.folder import read_manifest
from mtrain.config.machine import devices
from mtrain.world.join import JoinAttempt
from mtrain.world.rank_env import RankEnv
from mtrain.world.rank_info import RankInfo
from mtrain.world.rendezvous import Offer
from tests.support.commands import SMALL, wait_for
from tests.support.covering import some
from tests.support.launched import Launched, as_rank, free_port

RUN = (*SMALL, "cluster=cpu", "trainer.train_iters=2", "log.name=run")
Start = Callable[[Path, int], list[Launched]]


def ends(home: Path) -> dict[str, str]:
    """Return the hashes of everything that each rank saved at the end."""
    manifest = read_manifest(home / "runs/run/checkpoints/step_00000002", verify=True)
    return {
        name: facts["header_sha256"]
        for name, facts in manifest["files"].items()
        if name.startswith("rank_")
    }


def words(ranks: int) -> tuple[str, ...]:
    """Return the command of a run on so many ranks."""
    return (*RUN, f"parallel=tp{ranks}")


def _through_exec() -> None:
    devices.SHIPPED["cpu"] = replace(devices.CPU, fork_safe=False)


def forked(home: Path, ranks: int) -> list[Launched]:
    """Launch ranks that are forked from the launcher."""
    return [Launched(*words(ranks), cwd=home)]


def executed(home: Path, ranks: int) -> list[Launched]:
    """Launch ranks in interpreters of their own."""
    return [Launched(*words(ranks), cwd=home, patch=_through_exec)]


def as_of_torchrun(home: Path, ranks: int) -> list[Launched]:
    """Launch ranks as a launcher such as torchrun does."""
    port = free_port()
    return [
        Launched(*words(ranks), cwd=home, environment=as_rank(rank, ranks, port))
        for rank in range(ranks)
    ]


def task(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """Return the environment of a task of srun on one machine."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_NNODES": "1",
        "SLURM_STEP_NODELIST": "machine",
        "MASTER_PORT": str(port),
        **more,
    }


def _noting(home: Path) -> Callable[[], None]:
    """Return a patch that counts in a file how often this process composes a configuration."""

    def patch() -> None:
        from mtrain.cli import train

        real = train.load

        def load(*args: object, **kwargs: object) -> object:
            with (home / "composed").open("a") as file:
                file.write("composed\n")
            return real(*args, **kwargs)  # type: ignore[arg-type]

        train.load = load  # type: ignore[assignment]

    return patch


def as_tasks(home: Path, ranks: int) -> list[Launched]:
    """Launch a task of srun for each rank."""
    port = free_port()
    patch = _noting(home)
    return [
        Launched(*words(ranks), cwd=home, environment=task(rank, ranks, port), patch=patch)
        for rank in range(ranks)
    ]


def as_machines(home: Path, ranks: int) -> list[Launched]:
    """Launch a task of srun for each of two machines, which starts the ranks of its machine."""
    port = free_port()
    machines = {
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "m[1-2]",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_LOCALID": "0",
    }
    tasks = [task(index, 2, port, **machines, SLURM_NODEID=str(index)) for index in range(2)]
    return [Launched(*words(ranks), cwd=home, environment=one) for one in tasks]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """Return the hashes that forked ranks save, by the number of ranks."""
    known: dict[int, dict[str, str]] = {}

    def one(ranks: int) -> dict[str, str]:
        if ranks not in known:
            home = tmp_path_factory.mktemp("forked")
            finish(forked(home, ranks))
            known[ranks] = ends(home)
        return known[ranks]

    return one


def finish(started: list[Launched]) -> None:
    """Wait for processes that are to end well."""
    try:
        codes = [process.wait() for process in started]
        assert codes == [0] * len(started), [process.said for process in started]
    finally:
        for process in started:
            process.kill()


WAYS: dict[str, Start] = {
    "exec": executed,
    "torchrun": as_of_torchrun,
    "srun": as_tasks,
    "srun, one a machine": as_machines,
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", some(WAYS, ["torchrun", "srun"]))
def test_launchers_ranks_end_bitwise_as_forked(
    way: str, ranks: int, expected: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    finish(WAYS[way](tmp_path, ranks))
    assert ends(tmp_path) == expected(ranks)
    composed = tmp_path / "composed"
    assert not composed.exists() or composed.read_text() == "composed\n", "only rank 0 composes"


@pytest.mark.full
def test_launchers_foreign_torchrun_variables_are_ignored(tmp_path: Path) -> None:
    stray = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "other",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "3",
    }
    finish([Launched(*words(2), cwd=tmp_path, environment=stray)])


@pytest.mark.parametrize("verb", ["prove", pytest.param("rehearse", marks=pytest.mark.full)])
def test_launchers_stopped_verb_leaves_no_folder(verb: str, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def patch() -> None:
        tempfile.tempdir = str(scratch)

    run = Launched(verb, *words(2), cwd=tmp_path, patch=patch)
    try:
        wait_for(lambda: len(run.ranks()) == 2)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait() == 75, run.said
    finally:
        run.kill()
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("name", ["SIGUSR1", pytest.param("SIGHUP", marks=pytest.mark.full)])
def test_launchers_stopped_launcher_saves(name: str, tmp_path: Path) -> None:
    run = Launched(*words(1), "trainer.train_iters=100000", "log.progress=none", cwd=tmp_path)
    try:
        wait_for(lambda: (tmp_path / "runs/run/metrics.jsonl").exists())
        run_of = tmp_path / "runs/run"
        wait_for(lambda: (run_of / "metrics.jsonl").stat().st_size > 0)
        os.kill(run.pid, signal.Signals[name])
        assert run.wait() == 75, run.said
    finally:
        run.kill()
    assert list((run_of / "checkpoints").glob("step_*/manifest.json"))


def test_launchers_corpus_is_prepared_before_join(tmp_path: Path) -> None:
    preparing = tmp_path / "preparing"
    waiting = tmp_path / "waiting"

    def patch() -> None:
        from mtrain.data.text import tokenize
        from mtrain.world import join, rendezvous

        join.IMPORT_FACTOR = rendezvous.IMPORT_FACTOR = 1
        real_prepare = tokenize.prepare
        real_report = rendezvous.Member.report

        def prepare(*args: object, **kwargs: object) -> object:
            if not join._joined:
                preparing.touch()
                wait_for(waiting.exists)
                # longer than a rank that is ready waits for one that shows no sign of life
                time.sleep(3.5)
            with (tmp_path / "prepared").open("a") as file:
                file.write(f"{os.environ['RANK']} {join._joined}\n")
            return real_prepare(*args, **kwargs)  # type: ignore[arg-type]

        def report(self: rendezvous.Member, failure: str | None) -> None:
            real_report(self, failure)
            waiting.touch()

        tokenize.prepare = prepare  # type: ignore[assignment]
        rendezvous.Member.report = report  # type: ignore[method-assign]

    port = free_port()

    def start(rank: int) -> Launched:
        place = as_rank(rank, 2, port, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        return Launched(
            *words(2), "trainer.join_timeout_s=1", cwd=tmp_path, environment=place, patch=patch
        )

    first = start(0)
    wait_for(preparing.exists)
    finish([first, start(1)])
    prepared = (tmp_path / "prepared").read_text().splitlines()
    assert prepared[0] == "0 False"
    assert sorted(prepared[1:]) == ["0 True", "1 True"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["MTRAIN_CACHE", pytest.param("HOME", marks=pytest.mark.full)])
def test_launchers_run_starts_without_cache(name: str, tmp_path: Path) -> None:
    # a pool does not survive a fork
    threads = {
        "OMP_NUM_THREADS": "2",
        "MTRAIN_CACHE": "",
        name: "/proc/none",
    }
    finish([Launched(*words(1), cwd=tmp_path, environment=threads)])


def test_launchers_unknown_master_name_is_reported(tmp_path: Path) -> None:
    place = as_rank(0, 2, free_port(), MASTER_ADDR="no-such-machine.invalid")
    rank = Launched(*words(2), "trainer.join_timeout_s=1", cwd=tmp_path, environment=place)
    assert rank.wait() == 3, rank.said
    assert "MASTER_ADDR=no-such-machine.invalid: " in rank.said


def test_launchers_1000_ranks_join_one_store_in_10_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1024
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Connections are torch's own matter: what counts is how much the ranks ask the store.
    clients = [
        dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        for _ in range(8)
    ]
    monkeypatch.setattr(JoinAttempt, "_reach", lambda self: clients[self.env.rank % len(clients)])
    begun = time.process_time()  # of all ranks and the store, which are threads of this process
    attempts = []
    for rank in range(size):
        env = RankEnv(rank, size, 0, "127.0.0.1", server.port, launcher_serves=True, listen_fd=None)
        attempt = JoinAttempt(env, 60.0)
        offer = Offer("{}", ()) if rank == 0 else None
        attempt.present(RankInfo(rank, size, f"host{rank // 8}", rank, "digest"), {}, 60.0, offer)
        attempt.ready_at = time.monotonic()
        attempt.ready.set()
        attempts.append(attempt)
    for attempt in attempts:
        attempt.together()
    assert time.process_time() - begun < 10
    wait_for(lambda: threading.active_count() < size)
