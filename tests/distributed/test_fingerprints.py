"""Fingerprints of collectives in shared memory: recorded in ranks, read and compared elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from mtrain.world.fingerprints import (
    DESCRIPTOR,
    DONE,
    KEPT,
    UNDER_WAY,
    WAITED_FOR,
    Fingerprint,
    Memory,
    Ring,
    disagreement,
    places,
    position,
    recording,
    shared,
)
from mtrain.world.stall import Status
from tests.support.forked import run_ranks


def call(
    sequence: int,
    operation: str = "all_reduce",
    state: int = DONE,
    *,
    number: int = 0,
    **more: object,
) -> Fingerprint:
    """Return a fingerprint in group tp, of 4 x 64 numbers unless `more` says otherwise."""
    values = {"shape": (4, 64), "peer": -1, "group": 7, "name": "tp", "dtype": "float32", **more}
    return Fingerprint(number or sequence, sequence, state=state, operation=operation, **values)


def recorded() -> list[str]:
    """Make one of each kind of collective on two ranks; return in words what memory has of them."""
    memory = Memory()
    rank = dist.get_rank()
    two = torch.zeros(2, 3)
    one = torch.zeros(1, 3, dtype=torch.bfloat16)
    pair = dist.new_group([0, 1], group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    with recording(Ring(memory, 0, ahead=False)):
        dist.all_reduce(two)
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
        dist.all_gather_into_tensor(torch.zeros(2, 3, dtype=torch.bfloat16), one)
        dist.reduce_scatter_tensor(torch.zeros(1, 3), two)
        dist.all_to_all_single(torch.zeros_like(two), two)
        work = dist.broadcast(two, 1, async_op=True)
        dist.barrier()
        operations = (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend)
        both = [dist.P2POp(one, torch.zeros(5), 1 - rank, pair) for one in operations]
        works = dist.batch_isend_irecv(both)
        works[0].wait()
        words = [position([own]) for own in memory.read(0)]
        work.wait()
        works[1].wait()
        assert {own.state for own in memory.read(0)} == {DONE}
    number = len(memory.read(0))
    dist.all_reduce(two)  # nothing records it
    dist.barrier()
    assert len(memory.read(0)) == number
    return words


def test_fingerprints_name_every_kind_of_collective() -> None:
    first, second = run_ranks(2, recorded)
    assert first == [
        "after all_reduce #1 of world (float32 [2, 3])",
        "after all_gather #2 of world (float32 [3])",
        "after all_gather #3 of world (bfloat16 [2, 3])",
        "after reduce_scatter #4 of world (float32 [1, 3])",
        "after all_to_all #5 of world (float32 [2, 3])",
        "in broadcast #6 of world (float32 [2, 3])",
        "after barrier #7 of world",
        "after send #1 of pp to rank 1 (float32 [5])",
        "in recv #1 of pp from rank 1 (float32 [5])",
    ]
    assert second[:7] == first[:7]
    assert second[7:] == [
        "after recv #1 of pp from rank 0 (float32 [5])",
        "in send #1 of pp to rank 0 (float32 [5])",
    ]


def in_process(work: Callable[[], None]) -> int:
    """Fork a process that does `work` and ends by SIGKILL; return its status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


class Group:
    group_name = "12"
    group_desc = "TENSOR_MODEL_PARALLEL_GROUP"


@pytest.fixture(autouse=True)
def members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the stand-in for a group two ranks."""
    real = dist.get_process_group_ranks
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda g: [0, 1] if isinstance(g, Group) else real(g)
    )


def test_fingerprints_of_a_device_end_with_their_launch() -> None:
    ring = Ring(Memory(), 0, ahead=True)
    place = ring.begin(b"all_reduce", Group(), ([torch.zeros(2)],))
    assert position(ring.memory.read(0)) == "in all_reduce #1 of tp (float32 [2])"
    ring.returned(None, place)
    assert position(ring.memory.read(0)) == "after the launch of all_reduce #1 of tp (float32 [2])"


def test_fingerprints_outlive_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared(2) as descriptor:
        memory = Memory(descriptor)
        monkeypatch.setenv(DESCRIPTOR, str(descriptor))

        def work() -> None:
            group = Group()
            ring = Ring(Memory.here(), 1, ahead=False)
            for size in range(100):
                ring.begin(b"all_reduce", group, ([torch.zeros(size)],))

        assert os.WTERMSIG(in_process(work)) == signal.SIGKILL
    found = memory.read(1)
    assert memory.read(0) == []
    assert [own.number for own in found] == list(range(100 - KEPT + 1, 101))
    assert position(found) == "in all_reduce #100 of tp (float32 [99])"


def test_fingerprints_name_the_odd_rank_of_three() -> None:
    usual = [call(811), call(812, "reduce_scatter", WAITED_FOR)]
    calls = {
        0: usual,
        1: [*usual[:1], call(812, "all_gather", WAITED_FOR), call(813, shape=(1,))],
        2: usual,
    }
    words = "rank 1 made all_gather #812 of tp (float32 [4, 64]), the others reduce_scatter #812"
    assert disagreement(calls) == (f"{words} of tp (float32 [4, 64])", 1)
    del calls[2]
    words, culprit = disagreement(calls)
    assert culprit is None
    assert "rank 0 reduce_scatter #812 of tp" in words or "rank 1 all_gather #812" in words


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (call(9, shape=(4, 32)), True),
        (call(9, dtype="bfloat16"), True),
        (call(9, group=8), False),
        (call(10, "all_gather"), False),
    ],
)
def test_fingerprints_of_one_number_must_be_equal(other: Fingerprint, differs: bool) -> None:
    assert bool(disagreement({0: [call(9)], 1: [other], 2: [call(9)]})[0]) == differs


def test_fingerprints_may_differ_where_tensors_may() -> None:
    exchanges = [call(3, "all_to_all", shape=(size,)) for size in (5, 6)]
    transfers = [call(3, kind, peer=rank) for rank, kind in enumerate(("send", "recv"))]
    for own in (exchanges, transfers):
        assert disagreement(dict(enumerate([one] for one in own))) == ("", None)


def test_fingerprints_show_where_each_rank_is() -> None:
    # A rank waits in one collective and has launched later ones.
    waits = [call(5, state=WAITED_FOR), call(6, state=UNDER_WAY)]
    calls = {0: waits, 1: waits, 2: [call(4)], 3: waits, 4: []}
    assert places(calls) == (
        "rank 2 is after all_reduce #4 of tp (float32 [4, 64]),"
        " rank 4 is before its first collective,"
        " the others are in all_reduce #5 of tp (float32 [4, 64])"
    )


def test_fingerprints_travel_in_a_status() -> None:
    status = Status(1, "n", 2, 3, 4, "forward", True, "a.py:1", 0.5, recent=(call(3), call(4)))
    assert Status.of(status.text()) == status


@pytest.mark.full
def test_fingerprints_cost_microseconds() -> None:
    def cost() -> float:
        ring = Ring(Memory(), 0, ahead=False)
        group = dist.group.WORLD
        args = ([torch.zeros(4, 64)], None)
        for _ in range(100):
            ring.begin(b"all_reduce", group, args)
        rounds = []
        for _ in range(20):
            begun = time.thread_time()
            for _ in range(1000):
                ring.begin(b"all_reduce", group, args)
            rounds.append(time.thread_time() - begun)
        return min(rounds) * 1e3

    (microseconds,) = run_ranks(1, cost)
    print(f"recording a collective takes {microseconds:.2f} us of a core")
    assert microseconds < 50
