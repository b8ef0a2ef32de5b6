"""Prefetching in a thread: it reads the same batches, raises its errors when their batch is due,
and ends.
"""

from __future__ import annotations

import gc
import threading
import time

import pytest

from mtrain.data.prefetch import Prefetcher
from mtrain.errors import CorruptData
from tests.support.patience import patient

THREAD = "data ahead"


def following(key: int) -> int | None:
    return key + 1 if key < 9 else None


def threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def eventually(condition: object) -> bool:
    end = time.monotonic() + patient(30)
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_ahead_values_match_their_keys_in_any_order(depth: int) -> None:
    ahead = Prefetcher(lambda key: key * key, following, depth)
    assert [ahead.take(key) for key in (0, 1, 2, 7, 8, 9, 3, 3, 4)] == [
        0,
        1,
        4,
        49,
        64,
        81,
        9,
        9,
        16,
    ]
    ahead.close()
    assert threads() == 0
    assert ahead.take(5) == 25, "it begins anew"
    ahead.close()


def test_ahead_reads_bounded_count_and_not_beyond_end() -> None:
    read: list[int] = []

    def note(key: int) -> int:
        read.append(key)
        return key

    ahead = Prefetcher(note, following, 2)
    ahead.take(0)
    assert eventually(lambda: read == [0, 1, 2])
    time.sleep(0.05)
    assert read == [0, 1, 2]
    for key in range(1, 10):
        ahead.take(key)
    assert read == list(range(10))
    ahead.close()


def test_ahead_error_is_raised_at_its_value() -> None:
    def read(key: int) -> int:
        if key == 2:
            raise CorruptData("corpus.bin: offset 7: token id -1")
        return key

    ahead = Prefetcher(read, following, 3)
    assert [ahead.take(0), ahead.take(1)] == [0, 1]
    with pytest.raises(CorruptData, match="offset 7"):
        ahead.take(2)
    assert ahead.take(3) == 3
    ahead.close()


def test_ahead_forgotten_reader_leaves_no_thread() -> None:
    ahead = Prefetcher(lambda key: key, following, 2)
    ahead.take(0)
    assert threads() == 1
    del ahead
    gc.collect()
    assert eventually(lambda: threads() == 0)


def test_ahead_hanging_read_does_not_block_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtrain.data.prefetch.CLOSING_S", 0.1)
    held = threading.Event()
    ahead = Prefetcher(lambda key: key if key < 1 else held.wait(), following, 2)
    assert ahead.take(0) == 0
    ahead.close()
    assert threads() == 1, "the read is still held"
    held.set()
    assert eventually(lambda: threads() == 0)
