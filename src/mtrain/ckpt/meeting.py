"""Ranks that wait for each other in a store: for minutes where a disk is slow, and from any thread.

A barrier of the device's groups would end the run after their timeout, and hold the device meanwhile.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from mtrain.errors import TrainingError
from mtrain.world.heartbeat import tick

SHORTEST_S, LONGEST_S = 0.001, 0.1
"""Between two looks: thousands of ranks must not keep the store busy with asking."""
ALIVE_S = 0.25
CHUNK_BYTES = 4 << 20
"""A store of torch takes messages of 8 MiB."""
MAX_NAMED = 8
ADVICE = "a disk that is slower needs a larger checkpoint.barrier_timeout_s"


class Meeting:
    """This rank among others that call the same functions in the same order.

    Keys are numbered by a counter of the store, so that none is used twice, and those of a barrier are deleted when
    all have come to the next one.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.store, self.rank, self.size, self.timeout_s = store, rank, size, timeout_s

    def barrier(self, problem: str = "") -> str:
        """Wait for all ranks; returns the first `problem` that one of them came with, the same on every rank.

        Raises:
            TrainingError: some did not come in time.
        """
        number = self._next("barrier")
        place = f"barrier/{number}"
        if problem and self.store.add(f"{place}/problems", 1) == 1:
            self.store.set(f"{place}/problem", problem)
        if self.store.add(f"{place}/here", 1) == self.size:
            found = self.store.get(f"{place}/problem") if self.store.add(f"{place}/problems", 0) else b""
            self.store.set(f"{place}/over", found.decode() or " ")
        self._await(f"{place}/over", "barrier", number)
        found = self.store.get(f"{place}/over")
        if self.rank == 0:
            for name in ("problems", "problem", "here", "over"):
                self.store.delete_key(f"barrier/{number - 1}/{name}")
        return found.decode().strip()

    def tell(self, text: str) -> str:
        """The text of rank 0, on every rank.

        Raises:
            TrainingError: rank 0 does not say it in time, or some do not hear it.
        """
        number = self._next("word")
        place = f"word/{number}"
        if self.rank == 0:
            data = zlib.compress(text.encode(), 1)
            chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
            for index, chunk in enumerate(chunks):
                self.store.set(f"{place}/{index}", chunk)  # type: ignore[arg-type]
            self.store.set(f"{place}/told", str(len(chunks)))
        else:
            self._await(f"{place}/told", "word", number)
            count = int(self.store.get(f"{place}/told"))
            text = zlib.decompress(b"".join(self.store.get(f"{place}/{index}") for index in range(count))).decode()
        self.barrier()
        if self.rank == 0:
            for name in ("told", *map(str, range(len(chunks)))):
                self.store.delete_key(f"{place}/{name}")
        return text

    def _next(self, kind: str) -> int:
        return self.store.add(f"{kind}/of/{self.rank}", 1)

    def _await(self, key: str, kind: str, number: int) -> None:
        deadline, pause_s, event = time.monotonic() + self.timeout_s, SHORTEST_S, threading.Event()
        longest_s = LONGEST_S * max(1.0, self.size / 500)
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise TrainingError(f"{self._missing(kind, number)} within {self.timeout_s:g} s; {ADVICE}")
            event.wait(pause_s)  # and not `sleep`: it is others that are behind
            pause_s = min(2 * pause_s, longest_s)

    def _missing(self, kind: str, number: int) -> str:
        late = [rank for rank in range(self.size) if self.store.add(f"{kind}/of/{rank}", 0) < number]
        if not late:
            return "the store did not answer"
        named = ", ".join(map(str, late[:MAX_NAMED])) + (", ..." if len(late) > MAX_NAMED else "")
        return f"{'rank' if len(late) == 1 else 'ranks'} {named} did not come to where a checkpoint is saved or read"


@contextmanager
def alive(limit_s: float) -> Iterator[None]:
    """Show signs of life for `limit_s` at most while one call of the disk takes long: it makes no progress to see."""
    over, deadline = threading.Event(), time.monotonic() + limit_s

    def work() -> None:
        while not over.wait(ALIVE_S) and time.monotonic() < deadline:
            tick()

    thread = threading.Thread(target=work, name="disk", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
