"""Results that threads compute before they are taken, in order and within a memory limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mtrain.config.machine.hardware import cpu_cores

T = TypeVar("T")
R = TypeVar("R")
AHEAD_BYTES = 256 << 20
"""The most bytes of waiting results, in addition to the largest one."""
MOST_THREADS = 8


def prefetched(
    make: Callable[[T], R], items: Iterable[T], nbytes: Callable[[T], int]
) -> Iterator[tuple[T, R]]:
    """Yield each item with the result of `make`, in order; `nbytes` gives the size of a result.

    An error of a call is raised at its place. After it, or when the consumer stops, no waiting call
    is started.
    """
    waiting = deque[tuple[T, int, Future[R]]]()

    def full(need: int) -> bool:
        # the largest result never waits for room, which may not exist
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
            # leaving the pool would otherwise run every call that still waits
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _first(waiting: deque[tuple[T, int, Future[R]]]) -> tuple[T, R]:
    item, _, future = waiting.popleft()
    return item, future.result()
