"""Ranks that wait for each other in a store: for minutes where a disk is slow, and from any thread.

A barrier of the device's groups would end the run after their timeout, and hold the device
meanwhile.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.distributed import Store

from mtrain.errors import TrainingError
from mtrain.world.abandon import require_peers
from mtrain.world.heartbeat import tick, waiting

SHORTEST_S = 0.001
"""The first pause between two questions to the store; each further one is twice as long."""
LONGEST_S = 0.1
"""The longest pause of up to 500 ranks; more ranks pause longer, or they overload the store."""
ALIVE_S = 0.25
CHUNK_BYTES = 4 << 20
"""The most that is written at once: a store of torch takes messages of 8 MiB."""
MAX_NAMED = 8
ADVICE = "a disk that is slower needs a larger checkpoint.barrier_timeout_s"


class Meeting:
    """The place where this rank meets the others, which call the same functions in the same order.

    Keys are numbered by a counter in the store, so none is used twice. Rank 0 deletes the keys of a
    barrier once all ranks have come to the next one.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s

    def barrier(self, problem: str = "") -> str:
        """Wait for all ranks, and return the first `problem` that one of them came with, the same
        on every rank.

        Raises:
            TrainingError: some ranks did not come in time.
        """
        number = self._next("barrier")
        place = f"barrier/{number}"
        if problem and self.store.add(f"{place}/problems", 1) == 1:
            self.store.set(f"{place}/problem", problem)
        if self.store.add(f"{place}/here", 1) == self.size:
            if self.store.add(f"{place}/problems", 0):
                answer = self.store.get(f"{place}/problem")
            else:
                answer = b""
            self.store.set(f"{place}/over", answer.decode() or " ")
        self._await(f"{place}/over", "barrier", number)
        answer = self.store.get(f"{place}/over")
        # All ranks came here, so all have read the answer of the barrier before.
        if self.rank == 0:
            for name in ("problems", "problem", "here", "over"):
                self.store.delete_key(f"barrier/{number - 1}/{name}")
        return answer.decode().strip()

    def total(self, amount: int, remark: str = "") -> tuple[int, str]:
        """Return the sum of the amounts of all ranks, and the first `remark` that one of them made,
        on every rank.

        Raises:
            TrainingError: some ranks did not come in time.
        """
        number = self._next("sum")
        self.store.add(f"sum/{number}", amount)
        remark = self.barrier(remark)
        found = self.store.add(f"sum/{number}", 0)
        # All ranks came here, so all have read the sum before.
        if self.rank == 0:
            self.store.delete_key(f"sum/{number - 1}")
        return found, remark

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank.

        Raises:
            TrainingError: some ranks did not come in time.
        """
        number = self._next("gathered")
        self.store.set(f"gathered/{number}/{self.rank}", data)  # type: ignore[arg-type]
        self.barrier()
        found = [self.store.get(f"gathered/{number}/{rank}") for rank in range(self.size)]
        # All ranks came here, so all have read the results of the gather before.
        self.store.delete_key(f"gathered/{number - 1}/{self.rank}")
        return found

    def tell(self, text: str) -> str:
        """Return the text of rank 0, on every rank.

        Raises:
            TrainingError: rank 0 did not send it in time, or some ranks did not read it in time.
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
            text = zlib.decompress(
                b"".join(self.store.get(f"{place}/{index}") for index in range(count))
            ).decode()
        self.barrier()
        if self.rank == 0:
            for name in ("told", *map(str, range(len(chunks)))):
                self.store.delete_key(f"{place}/{name}")
        return text

    def _next(self, kind: str) -> int:
        return self.store.add(f"{kind}/of/{self.rank}", 1)

    def _await(self, key: str, kind: str, number: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        pause_s = SHORTEST_S
        # Many ranks poll one store: the more there are, the more rarely each asks.
        longest_s = LONGEST_S * max(1.0, self.size / 500)
        with _noted():
            while not self.store.check([key]):
                require_peers()
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"{self._missing(kind, number)} within {self.timeout_s:g} s; {ADVICE}"
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _missing(self, kind: str, number: int) -> str:
        late = [
            rank for rank in range(self.size) if self.store.add(f"{kind}/of/{rank}", 0) < number
        ]
        if not late:
            return "the store did not answer"
        named = ", ".join(map(str, late[:MAX_NAMED])) + (", ..." if len(late) > MAX_NAMED else "")
        return (
            f"{'rank' if len(late) == 1 else 'ranks'} {named} did not come to where a checkpoint is"
            " saved or read"
        )


def _noted() -> AbstractContextManager[None]:
    """Note that the main thread waits for others, so that a stall is not blamed on this rank."""
    on_main = threading.current_thread() is threading.main_thread()
    return waiting() if on_main else nullcontext()


@contextmanager
def alive(limit_s: float) -> Iterator[None]:
    """Tick for at most `limit_s` seconds: a long call to the disk shows no progress of its own."""
    over = threading.Event()
    deadline = time.monotonic() + limit_s

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
