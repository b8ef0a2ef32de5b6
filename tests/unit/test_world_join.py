"""An attempt to join, on a store in this process: orders of events that real ranks
rarely come in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from mtrain.world import join
from mtrain.world.join import PATIENCE, JoinAttempt
from mtrain.world.rank_env import End, RankEnv
from mtrain.world.rank_info import RankInfo, Refused
from mtrain.world.rendezvous import (
    DECIDING,
    IMPORT_FACTOR,
    LIFE_S,
    Coordinator,
    Liveness,
    Offer,
    newest,
)
from tests.support.patience import patient

SIZE = 2
OFFER = Offer("{}", ("words",))
SOON_S = 20.0
"""The time that a busy machine may take for what needs some hundredths of a second."""


class Attempt(JoinAttempt):
    """An attempt on a given store; `before` is called when the store is reached."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        join_timeout_s: float = 60.0,
        before: Callable[[Attempt], None] = lambda attempt: None,
        end: End | None = None,
    ) -> None:
        self.given = store
        self.before = before
        env = RankEnv(rank, SIZE, rank, host=None, port=0, launcher_serves=True, listen_fd=None)
        super().__init__(env, join_timeout_s, end)

    def _reach(self) -> dist.Store:
        self.before(self)
        return self.given


def root_of(store: dist.Store) -> dist.Store:
    return dist.PrefixStore("mtrain/join", store)


def info(rank: int) -> RankInfo:
    return RankInfo(rank, SIZE, "host", 100 + rank, "digest")


def comes_true(what: Callable[[], bool], within_s: float = SOON_S) -> bool:
    until = time.monotonic() + patient(within_s)
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    return what()


def called(root: dist.Store, offer: Offer | None = None) -> Coordinator:
    """Open a rendezvous as a rank 0 that then looks no further."""
    coordinator = Coordinator(root, info(0), {}, 60.0, offer=offer)
    coordinator.open(root)
    return coordinator


def test_join_rank_0_as_late_as_its_store_is_awaited() -> None:
    """Wait for rank 0's offer after its store: whoever waited long for the store has not yet waited
    for the offer.
    """
    store = dist.HashStore()

    def late(attempt: Attempt) -> None:
        attempt.begun_at -= (
            55.0  # of 60; rank 0 says a moment after it serves the store that it has come
        )

    attempt = Attempt(store, 1, before=late)
    assert comes_true(lambda: attempt.heard > 0)
    time.sleep(0.2)
    assert not attempt.offered.is_set()
    called(root_of(store), OFFER)
    assert attempt.read_offer() == OFFER
    attempt.closed = True


def test_join_rank_0_decides_once() -> None:
    """Reuse a launcher's store, which outlives a start: a rank 0 that came to the last one is not
    awaited in the next.
    """
    store = dist.HashStore()
    attempt = Attempt(store, 0)
    root = root_of(store)
    assert comes_true(lambda: root.add(DECIDING, 0) == 1)
    attempt.present(info(0), {}, 60.0, OFFER)
    assert comes_true(lambda: newest(root) == 1)
    assert comes_true(lambda: root.add(DECIDING, 0) == 0)
    attempt.closed = True


@pytest.mark.full
def test_join_rank_at_store_waits_longer_for_rank_0() -> None:
    limit_s = float(patient(1.0))
    for deciding in (0, 1):
        store = dist.HashStore()
        root_of(store).add(DECIDING, deciding)
        attempt = Attempt(store, 1, join_timeout_s=limit_s)
        if deciding:
            time.sleep((PATIENCE + 1) * limit_s)
            assert not attempt.offered.is_set()
        else:
            assert comes_true(attempt.offered.is_set)
        attempt.closed = True


def test_join_rank_0_replaces_provisional_rendezvous() -> None:
    store = dist.HashStore()
    root = root_of(store)
    Coordinator(root, info(1), {}, 60.0, 59.0).open_instead_of(None, root)
    first = Attempt(store, 0)
    first.present(info(0), {}, 60.0, OFFER)
    second = Attempt(store, 1)
    assert second.read_offer() == OFFER
    assert newest(root) == 2
    first.closed = True
    second.closed = True


def test_join_replacement_keeps_newer_rendezvous() -> None:
    root = root_of(dist.HashStore())
    first = called(root)
    late = Coordinator(root, info(1), {}, 60.0, 59.0)
    late.open_instead_of(None, root)
    assert newest(root) == first.number
    late.open_instead_of(first.number, root)
    assert newest(root) == late.number


def test_join_rank_leaves_after_stating_reason() -> None:
    store = dist.HashStore()
    coordinator = called(root_of(store))
    attempt = Attempt(store, 1)
    attempt.present(info(1), {}, 60.0)
    assert comes_true(lambda: coordinator.store.add("infos", 0) == 1)
    attempt.failure = "no disk"  # the first line of `give_up`, whose thread is held here
    assert not attempt.settled.wait(0.5)
    assert attempt.give_up("no disk")
    coordinator.look()
    assert coordinator.state.failed == {0: "no disk"}


@pytest.mark.full
def test_join_replaced_rank_0_does_not_wait_forever() -> None:
    store = dist.HashStore()
    attempt = Attempt(store, 0, join_timeout_s=0.1)
    attempt.present(info(0), {}, 0.1)
    assert comes_true(lambda: newest(root_of(store)) == 1)
    called(root_of(store))  # by a second rank 0, which ends at once
    began = time.monotonic()
    with pytest.raises(Refused, match="fallen silent"):
        attempt.together()
    assert time.monotonic() - began > 0.1 * IMPORT_FACTOR


def test_join_liveness_lasts_a_while() -> None:
    store = dist.HashStore()
    worker = Liveness(store, SIZE)
    other = Liveness(store, SIZE)
    assert not other.is_alive()
    worker.beat()
    worker.beat()
    assert store.add("beats", 0) == 1, "no more than one in a second"
    assert other.is_alive()
    other.heard_at -= LIFE_S + 1
    assert not other.is_alive()


def test_join_liveness_of_many_ranks_outlasts_a_pause() -> None:
    assert Liveness(dist.HashStore(), 40_000).life_s > 2 * join.pause_of(40_000)
