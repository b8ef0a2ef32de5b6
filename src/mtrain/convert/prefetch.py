"""Results that threads compute ahead of who takes them, in order and within bounds of memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mtrain.config.machine.hardware import cpu_cores

T = TypeVar("T")
R = TypeVar("R")
AHEAD_BYTES = 256 << 20
"""Of results at once, beside the largest one."""
MOST_THREADS = 8


def ahead(
    make: Callable[[T], R], items: Iterable[T], nbytes: Callable[[T], int]
) -> Iterator[tuple[T, R]]:
    """Yield each item with what `make` gives for it, in their order; `nbytes`: of a result.

    What a call raises is raised at its place. Then, or when nobody takes more, nothing that waits
    is begun.
    """
    waiting = deque[tuple[T, int, Future[R]]]()

    def full(need: int) -> bool:
        sizes = [need, *(size for _, size, _ in waiting)]
        return sum(sizes) - max(sizes) > AHEAD_BYTES

    with ThreadPoolExecutor(min(cpu_cores(), MOST_THREADS)) as threads:
        try:
            for item in items:
                need = nbytes(item)
                while waiting and full(need):
                    yield _first(waiting)
                waiting.append((item, need, threads.submit(make, item)))
            while waiting:
                yield _first(waiting)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _first(waiting: deque[tuple[T, int, Future[R]]]) -> tuple[T, R]:
    item, _, future = waiting.popleft()
    return item, future.result()
