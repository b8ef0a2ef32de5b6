"""Many ranks of one checkpoint as threads of this process, and the calls of the file system that
they make.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.patience import patient

METADATA = (
    "stat",
    "lstat",
    "scandir",
    "listdir",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "replace",
    "link",
    "chmod",
)


@contextmanager
def metadata_calls() -> Iterator[Counter[str]]:
    """Count the calls that a file system's metadata server answers, by name."""
    counted: Counter[str] = Counter()
    real = {name: getattr(os, name) for name in METADATA} | {"open": os.open}
    real_open = builtins.open

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(path: Any = ".", *words: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike):
                counted[name] += 1
            return call(path, *words, **more)

        return counted_call

    try:
        for name, call in real.items():
            setattr(os, name, counting(name, call))
        io.open = builtins.open = counting("open", real_open)
        yield counted
    finally:
        for name, call in real.items():
            setattr(os, name, call)
        io.open = builtins.open = real_open


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` on each of many ranks, which are threads; return values, or errors, by rank."""
    values: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            values[rank] = work(rank)
        except BaseException as error:
            values[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = next((value for value in values if isinstance(value, AssertionError)), None)
    if failed is not None:
        raise failed
    return values


def meetings(size: int, timeout_s: float = 60.0) -> list[Any]:
    """Return the meeting places of all ranks in one store."""
    from mtrain.ckpt.meeting import Meeting

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return [Meeting(store, rank, size, timeout_s) for rank in range(size)]


class Turns:
    """Order of ranks of which one runs at a time."""

    def __init__(self, size: int) -> None:
        self.of = [threading.Event() for _ in range(size)]
        self.of[0].set()
        self.told = ""
        self.amounts = [0] * size


@dataclass
class InTurn:
    """Meeting place of a rank that runs until it waits for the others, and then lets the next one
    run.
    """

    turns: Turns
    rank: int
    size: int
    timeout_s: float = 60.0

    def begin(self) -> None:
        assert self.turns.of[self.rank].wait(patient(self.timeout_s))
        self.turns.of[self.rank].clear()

    def end(self) -> None:
        self.turns.of[(self.rank + 1) % self.size].set()

    def barrier(self, problem: str = "") -> str:
        assert problem == ""
        self.end()
        self.begin()
        return ""

    def total(self, amount: int) -> tuple[int, str]:
        self.turns.amounts[self.rank] = amount
        remark = self.barrier()
        return sum(self.turns.amounts), remark

    def tell(self, text: str) -> str:
        self.turns.told = text if self.rank == 0 else self.turns.told
        self.barrier()
        return self.turns.told


def in_turn(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call `work` on each of many ranks, one at a time; return values, or errors, by rank."""
    turns = Turns(size)

    def one(rank: int) -> Any:
        place = InTurn(turns, rank, size)
        place.begin()
        try:
            return work(place)
        finally:
            place.end()

    return on_ranks(size, one)
