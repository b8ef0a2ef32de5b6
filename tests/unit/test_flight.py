"""The flight recorder: what is read of torch's dumps, and who is blamed where every rank waits in
the same line.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Work

from mtrain.world import stacks, stall
from mtrain.world.heartbeat import heartbeat, noting_waits, waiting
from mtrain.world.stall import UNKNOWN, Calls, Status, name_straggler


def entry(
    name: str,
    number: int,
    state: str = "completed",
    *,
    started: bool = True,
    p2p: bool = False,
    by: str = "nccl",
) -> dict[str, Any]:
    """Return an entry as torch 2.13 and 2.11 write it, without sizes and types."""
    return {
        "collective_seq_id": 0 if p2p else number,
        "is_p2p": p2p,
        "op_id": number,
        "p2p_seq_id": number if p2p else 0,
        "pg_id": int(name),
        "process_group": [name, f"group {name}"],
        "profiling_name": f"{by}:{'recv 1<-0' if p2p else 'all_reduce'}",
        "record_id": number,
        "retired": state == "completed",
        "state": "scheduled" if by == "gloo" else state,
        "time_created_ns": 1795725663405400226,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 1795725663405500000 if started and by == "nccl" else 0,
        "timeout_ms": 660000,
    }


def dump(*entries: dict[str, Any], version: str = "2.10", **status: tuple[int, int, int]) -> bytes:
    """Return a dump in JSON; `status` holds the last enqueued, started and completed call by group
    number.
    """
    names = ("enqueued", "started", "completed")
    return json.dumps(
        {
            "comm_lib_version": "2.27.7",
            "nccl_comm_state": {},
            "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1]"}},
            "pg_status": {
                uid.removeprefix("of_"): {
                    f"last_{name}_collective": str(number)
                    for name, number in zip(names, numbers, strict=True)
                }
                for uid, numbers in status.items()
            },
            "version": version,
            **({"entries": list(entries)} if entries else {}),
        }
    ).encode()


@pytest.mark.parametrize("version", ["2.10", "2.9"])
def test_flight_entries_give_progress_of_each_group(version: str) -> None:
    entries = [
        *(entry("0", number) for number in (1, 2)),
        entry("0", 3, "started"),
        entry("0", 4, "scheduled", started=False),
        entry("5", 9, "completed", started=False),  # nothing is timed
        *(entry("6", number, p2p=True) for number in (40, 41)),
    ]
    assert stall.calls_of_entries(dump(*entries, version=version)) == {
        "0": Calls("group 0", 4, 3, 2),
        "5": Calls("group 5", 9, UNKNOWN, 9),
    }


def test_flight_retired_gloo_collective_has_ended() -> None:
    entries = [entry("1", 1, by="gloo"), entry("1", 2, "scheduled", by="gloo")]
    assert stall.calls_of_entries(dump(*entries)) == {"1": Calls("group 1", 2, UNKNOWN, 1)}


def test_flight_empty_dump_belongs_to_no_group() -> None:
    assert stall.calls_of_entries(b"{}") == stall.calls_of_entries(dump(of_0=(3, 3, 3))) == {}


def test_flight_transfer_status_is_distinguished() -> None:
    groups = [
        stall.Group(0, "0", "world", 7),
        stall.Group(4, "11", "pipeline", 2),
        stall.Group(9, "12", "tp", 0),
    ]
    assert stall.calls_of_status(dump(of_0=(7, -1, 6), of_4=(80, -1, 79)), groups) == {
        "0": Calls("world", 7, UNKNOWN, 6),
        "11": Calls("pipeline", 2, UNKNOWN, UNKNOWN),
        "12": Calls("tp", 0, UNKNOWN, UNKNOWN),
    }


def of_rank(
    rank: int, count: int = 5, *, waits: bool = True, **calls: tuple[int, int, int]
) -> Status:
    """Return a status of a rank that waits in the same line as all others; `calls`: launched,
    started, done by group.
    """
    numbers = {name: Calls(name, *group) for name, group in calls.items()}
    return Status(
        rank,
        "host",
        100 + rank,
        1,
        count,
        "step 7, backward",
        waits,
        "step.py:1 in f",
        9.0,
        numbers,
    )


def said(*statuses: Status) -> str:
    """Blame a rank by statuses that have travelled as text."""
    return name_straggler({s.rank: Status.of(s.text()) for s in statuses}, set(), len(statuses))


def test_flight_rank_lacking_a_collective_is_blamed() -> None:
    ranks = [
        of_rank(rank, dp=(8, UNKNOWN, 7) if rank != 2 else (7, UNKNOWN, 7)) for rank in range(4)
    ]
    who = "rank 2 (host, process 102) is behind, in step 7, backward, at step.py:1 in f"
    assert (
        said(*ranks)
        == f"{who}; it has not launched collective 8 of dp, in which ranks 0, 1, 3 wait"
    )
    busy = [of_rank(s.rank, waits=False, dp=(s.calls["dp"].launched, -1, 7)) for s in ranks]
    assert said(*busy) == said(*ranks)  # a host that launches ahead waits in no line that is known


def test_flight_waiting_rank_is_not_blamed() -> None:
    ranks = [
        of_rank(0, tp0=(5, UNKNOWN, 4), dp0=(1, UNKNOWN, 1)),
        of_rank(1, tp0=(4, UNKNOWN, 4), dp1=(1, UNKNOWN, 1)),  # holds up 0 and 3
        of_rank(2, tp1=(9, UNKNOWN, 9), dp0=(2, UNKNOWN, 1)),  # waits for 0
        of_rank(3, tp1=(9, UNKNOWN, 9), dp1=(2, UNKNOWN, 1)),
    ]
    assert said(*ranks).startswith("rank 1 (host, process 101) is behind")


def test_flight_rank_with_ended_collectives_waits_for_none() -> None:
    ranks = [of_rank(0, dp=(8, UNKNOWN, 8)), of_rank(1, count=4, dp=(7, UNKNOWN, 7))]
    assert said(*ranks).startswith(
        "rank 1 (host, process 101) waits like all others, and is behind"
    )


def test_flight_unlaunched_device_is_blamed() -> None:
    ranks = [of_rank(0, dp=(8, 8, 7)), of_rank(1, dp=(8, 7, 7)), of_rank(2, dp=(8, 8, 7))]
    assert "rank 1 (host, process 101) is behind" in said(*ranks)
    assert said(*ranks).endswith("it has not begun collective 8 of dp, in which ranks 0, 2 wait")


def test_flight_unawaited_collective_is_reported_done() -> None:
    ranks = [of_rank(0, dp=(10, UNKNOWN, 8)), of_rank(1, dp=(7, UNKNOWN, 7))]
    assert said(*ranks).endswith("it has not launched collective 8 of dp, which is done for others")


def test_flight_equal_launches_use_older_evidence() -> None:
    ranks = [of_rank(0, dp=(8, UNKNOWN, 7)), of_rank(1, dp=(8, UNKNOWN, 7))]
    assert said(*ranks) == "every rank waits for the others, in step 7, backward"


def test_flight_idle_rank_is_blamed_before_waiting_stage() -> None:
    ranks = [
        of_rank(0, dp0=(1, UNKNOWN, 1)),
        of_rank(1, waits=False, dp0=(1, UNKNOWN, 1)),  # holds up stage 1 of its pipeline
        of_rank(2, dp1=(2, UNKNOWN, 1)),
        of_rank(3, dp1=(1, UNKNOWN, 1)),
    ]
    assert said(*ranks).startswith("rank 1 (host, process 101) is behind")


def test_flight_mutual_lack_makes_all_suspects() -> None:
    ranks = [
        of_rank(0, a=(2, UNKNOWN, 1), b=(1, UNKNOWN, 1)),
        of_rank(1, count=4, a=(1, UNKNOWN, 1), b=(2, UNKNOWN, 1)),
    ]
    assert said(*ranks).startswith("rank 1 (host, process 101) is behind")


def test_flight_1000_ranks_compare_in_a_second() -> None:
    ranks = [of_rank(r, world=(8, UNKNOWN, 7), dp=(3 - (r == 77), UNKNOWN, 2)) for r in range(1024)]
    assert list(stall.awaited({s.rank: s for s in ranks})) == [77]


def test_flight_watched_main_thread_waits_are_noted() -> None:
    class Slow(Work):
        """Work whose wait looks at what is noted."""

    seen = []
    real = Work.wait
    Work.wait = lambda *_: seen.append(
        (heartbeat.waits, stacks.is_waiting(None), stacks.place(stacks.main_frame()))
    )  # type: ignore[assignment,method-assign]
    try:
        with noting_waits():
            Slow().wait()
            other = threading.Thread(target=Slow().wait)
            other.start()
            other.join()
        Slow().wait()
    finally:
        Work.wait = real  # type: ignore[method-assign]
    assert [noted for noted, _, _ in seen] == [1, 0, 0]
    assert [waited for _, waited, _ in seen] == [True, False, False]
    with waiting():
        assert stacks.is_waiting(None)
    assert not heartbeat.waits


@pytest.fixture
def recorder() -> stall.Recorder:
    return stall.Recorder(torch.device("cpu"), 3)


def test_flight_without_recording_has_no_calls(recorder: stall.Recorder) -> None:
    recorder.of_others = None
    assert recorder.calls() == {}


def test_flight_hanging_device_is_not_queried_for_nccl(
    recorder: stall.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    recorder.of_nccl = lambda *flags: asked.append(flags) or dump(of_2=(5, 5, 4))  # type: ignore[func-returns-value]
    monkeypatch.setattr(recorder, "_groups", lambda: [stall.Group(2, "7", "tp", 5)])
    assert recorder.calls() == {"7": Calls("tp", 5, 5, 4)}
    assert asked == [(False, False)]


def test_flight_torch_thread_writes_nccl_record(
    recorder: stall.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stall.PIPE, str(tmp_path / "pipe-"))
    pipe = tmp_path / "pipe-3.pipe"
    os.mkfifo(pipe)
    recorder.write(tmp_path / "none.json")  # nobody reads: torch has ended its thread
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    recorder.write(tmp_path / "none.json")
    assert os.read(reader, 128)
    os.close(reader)
    recorder.close()
    assert list(tmp_path.iterdir()) == []
