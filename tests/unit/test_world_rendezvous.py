"""Messages about ranks that form no world, and the blame for a stall: pure functions of the ranks'
reports.
"""

from __future__ import annotations

import threading
import timeit
from dataclasses import replace
from typing import Any

import pytest

from mtrain.config.machine import nvml
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import BadEnvironment
from mtrain.world import heartbeat, join, stacks
from mtrain.world.rank_env import LAUNCHER, RankEnv
from mtrain.world.rank_info import RankInfo, RendezvousState, absence, faults, unreadiness
from mtrain.world.stall import Finding, Status, idle_s, name_straggler
from tests.support.configs import LAPTOP, tiny
from tests.support.nvml import Library


def info(rank: int, size: int = 4, digest: str = "a", **facts: str) -> RankInfo:
    return RankInfo(rank, size, f"host{rank // 2}", 100 + rank, digest, facts)


def nothing(digest: str) -> dict[str, Any] | None:
    return None


def test_rendezvous_ready_equal_ranks_are_a_world() -> None:
    state = RendezvousState([info(rank) for rank in range(4)], ready={0, 1, 2})
    assert not state.is_wrong()
    assert not state.is_world(4)
    state.ready.add(3)
    assert state.is_world(4)


def test_rendezvous_absent_ranks_list_present_machines() -> None:
    state = RendezvousState([info(rank, 8) for rank in (7, 0, 1, 2, 4, 6)])
    said = absence(state, 8, 5.0)
    assert said.startswith(
        "ranks 3 and 5 of 8 did not arrive within 5 s; arrived: 0, 1 on host0, 2 on host1, 4 on"
    )
    assert "trainer.join_timeout_s=50" in said


def test_rendezvous_number_ranges_are_short() -> None:
    state = RendezvousState([info(rank, 100) for rank in range(50)])
    assert absence(state, 100, 5.0).startswith("ranks 50-99 of 100 did not arrive")
    assert "and 17 more machines" in absence(state, 100, 5.0)


def test_rendezvous_differing_keys_list_both_values() -> None:
    configs = {"a": {"optim.lr": 0.1, "model.name": "m"}, "b": {"optim.lr": 0.2, "model.name": "m"}}
    state = RendezvousState(
        [info(0, 3, torch="2.1"), info(1, 3, digest="b", torch="2.1"), info(2, 3, torch="2.2")]
    )
    said = faults(state, configs.get)
    assert said == [
        (
            "ranks [1] differ from rank 0 in version or configuration:\n"
            "  optim.lr: 0.2 on rank 1 (host0, process 101), 0.1 on rank 0 (host0, process 100)"
        ),
        (
            "ranks [2] differ from rank 0 in version or configuration:\n"
            "  torch: 2.2 on rank 2 (host1, process 102), 2.1 on rank 0 (host0, process 100)"
        ),
    ]


def test_rendezvous_minority_is_odd_unknown_has_digest() -> None:
    state = RendezvousState(
        [info(0, digest="b" * 64), *(info(rank, digest="a" * 64) for rank in (1, 2, 3))]
    )
    assert faults(state, nothing) == [
        "ranks [0] differ from rank 1 in version or configuration:\n"
        "  configuration: digest bbbbbbbbbbbb on rank 0 (host0, process 100), "
        "digest aaaaaaaaaaaa on rank 1 (host0, process 101)"
    ]


def test_rendezvous_reports_all_faults_at_once() -> None:
    state = RendezvousState([info(0, 2), info(1, 3), info(1, 2), info(2, 3)], failed={3: "no disk"})
    said = faults(state, nothing)
    assert said[0] == "rank 2 (host1, process 102) ended before it was ready: no disk"
    assert said[1].startswith("RANK 1 came twice: host0, process 101 and host0, process 101")
    assert said[2].startswith("WORLD_SIZE differs: 2 on ranks 0, 1, 3 on ranks 1, 2")
    assert state.is_wrong()


def test_rendezvous_shared_gpu_names_both_tasks() -> None:
    """Show each rank one GPU, as tasks with one GPU each do."""
    given = ["GPU-a", "GPU-b", "GPU-a", ""]
    state = RendezvousState([replace(info(rank), gpu=gpu) for rank, gpu in enumerate(given)])
    assert state.is_wrong()
    (said,) = faults(state, nothing)
    assert said.startswith(
        "ranks 0, 2 were given the same GPU, GPU-a of host0\n  fix: a GPU for each task"
    )
    again = RendezvousState([replace(info(1), gpu="GPU-a")] * 2)
    assert not again.shared_gpus(), "that is a rank that came twice"


@pytest.mark.parametrize(
    ("launcher", "visible", "gpu"),
    [("slurm", "1", "GPU-1111-af"), ("slurm", "0,1", ""), ("", "1", "")],
)
def test_rendezvous_single_visible_gpu_is_identified(
    launcher: str, visible: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = Library()
    monkeypatch.setattr(nvml, "driver", lambda: nvml.asked(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = resolve(tiny(cluster__device="cuda"), LAPTOP)
    env = RankEnv.here(
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1", LAUNCHER: launcher}
    )
    assert join._only_gpu(run, env) == gpu


def test_rendezvous_failed_rank_is_not_compared() -> None:
    state = RendezvousState([info(0, 2), info(1, 2, digest="")], failed={1: "no disk"})
    assert faults(state, nothing) == [
        "rank 1 (host0, process 101) ended before it was ready: no disk"
    ]


def test_rendezvous_unready_ranks_are_named() -> None:
    state = RendezvousState([info(0), info(1), info(2), info(3)], ready={0, 2})
    assert unreadiness(state, 60.0).startswith(
        "rank 1 (host0, process 101), rank 3 (host1, process 103) arrived, but were not ready"
        " within 60 s"
    )


def test_rendezvous_card_round_trips() -> None:
    assert RankInfo.of(info(3, torch="2").text()) == info(3, torch="2")
    assert RankInfo.of(
        info(3).text().replace('"pid"', '"a_key_of_another_version": 1, "pid"')
    ) == info(3)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK is 2 and WORLD_SIZE is 2: ranks are numbered from 0 to 1",
        ),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_rendezvous_bad_environment_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        RankEnv.here(environment)


def test_rendezvous_store_is_in_rank_0_without_launcher() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert RankEnv.here(environment).serves
    assert not RankEnv.here({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}).serves
    assert not RankEnv.here({**environment, "RANK": "1"}).serves


def status(rank: int, count: int, *, waits: bool, idle: float = 9.0) -> Status:
    return Status(rank, "host", 100 + rank, 1, count, "step 7, forward", waits, "x.py:1 in f", idle)


def known(*statuses: Status) -> dict[int, Status]:
    return {s.rank: s for s in statuses}


def test_rendezvous_silent_rank_is_blamed_before_slow() -> None:
    ranks = known(status(0, 5, waits=True), status(1, 3, waits=False), status(2, 5, waits=False))
    said = name_straggler(ranks, {2}, 3)
    assert said.startswith("rank 2 (host, process 102) gives no sign of life")
    assert "in step 7, forward" in said


def test_rendezvous_unstarted_rank_is_blamed_first() -> None:
    assert (
        name_straggler(known(status(0, 5, waits=True)), {0}, 3)
        == "ranks 1, 2 have not begun to train"
    )


def test_rendezvous_waiting_stage_is_not_blamed() -> None:
    ranks = known(status(0, 6, waits=False), status(1, 5, waits=True), status(2, 4, waits=True))
    assert (
        name_straggler(ranks, set(), 3)
        == "rank 0 (host, process 100) is behind, in step 7, forward, at x.py:1 in f"
    )


def test_rendezvous_least_advanced_busy_rank_is_blamed() -> None:
    ranks = known(status(0, 6, waits=False), status(1, 5, waits=False), status(2, 5, waits=False))
    assert name_straggler(ranks, set(), 3).startswith(
        "rank 1 (host, process 101), rank 2 (host, process 102) are behind"
    )


def test_rendezvous_least_advanced_waiting_is_blamed() -> None:
    ranks = known(status(0, 6, waits=True), status(1, 5, waits=True))
    assert name_straggler(ranks, set(), 2).startswith(
        "rank 1 (host, process 101) waits like all others, and is behind"
    )
    ranks = known(status(0, 5, waits=True), status(1, 5, waits=True))
    assert name_straggler(ranks, set(), 2) == "every rank waits for the others, in step 7, forward"


def test_rendezvous_progress_prevents_a_stall() -> None:
    ranks = known(status(0, 5, waits=True, idle=99.0), status(1, 5, waits=False, idle=0.5))
    assert idle_s(ranks, set()) == 0.5
    assert idle_s(ranks, {1}) == 99.0


def test_rendezvous_status_and_finding_round_trip() -> None:
    assert Status.of(status(0, 6, waits=True).text()) == status(0, 6, waits=True)
    assert Finding.of(Finding(1.0, "x", 2, 3).text()) == Finding(1.0, "x", 2, 3)


def test_rendezvous_sleeping_thread_awaits_nobody(tmp_path: Any) -> None:
    assert not stacks.is_waiting(stacks.main_frame())
    over = threading.Event()
    sleeper = threading.Thread(target=over.wait, name="sleeper")
    sleeper.start()
    stacks.write(tmp_path / "errors/stacks.txt", "title")
    over.set()
    sleeper.join()
    text = (tmp_path / "errors/stacks.txt").read_text()
    assert text.startswith("title\n\nMainThread, most recent call last:")
    assert 'stacks.write(tmp_path / "errors/stacks.txt", "title")' in text
    assert "sleeper, most recent call last:" in text


def test_rendezvous_beat_takes_under_a_microsecond() -> None:
    assert (
        min(timeit.repeat(lambda: heartbeat.begin_phase("forward"), number=10_000, repeat=20))
        / 10_000
        < 1e-6
    )


def test_rendezvous_beat_is_a_milestone_tick_is_not() -> None:
    before = heartbeat.heartbeat.count
    ticks = heartbeat.heartbeat.ticks
    heartbeat.begin_step(7)
    heartbeat.tick()
    assert (heartbeat.heartbeat.count, heartbeat.heartbeat.ticks, heartbeat.heartbeat.place) == (
        before + 1,
        ticks + 1,
        "step 7, data",
    )
