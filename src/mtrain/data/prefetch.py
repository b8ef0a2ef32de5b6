"""A prefetcher: a thread reads the next values before their consumer takes them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# How long `close` waits for a started read, so that a disk that hangs cannot block a run
CLOSING_S = 2.0


class _Read(Generic[K, V]):
    """One read: its key, and its outcome once the thread has finished it."""

    def __init__(self, key: K) -> None:
        self.key = key
        self.wanted = True
        self.outcome: SimpleQueue[tuple[V | None, BaseException | None]] = SimpleQueue()


class Prefetcher(Generic[K, V]):
    """A reader of values by key, up to `depth` keys ahead of the one that is taken.

    With a depth of 0, each value is read when it is taken. `read(key)` depends only on its key, so
    an unexpected key drops the values read ahead without changing any. `following(key)` is the key
    that is taken next, or None at the end. `take` raises the error of its read. The thread ends
    with this object, even without `close`.
    """

    def __init__(
        self, read: Callable[[K], V], following: Callable[[K], K | None], depth: int
    ) -> None:
        self._read = read
        self._following = following
        self._depth = depth
        self._ahead: deque[_Read[K, V]] = deque()
        self._tasks: SimpleQueue[_Read[K, V] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, key: K) -> V:
        """Return the value of `key`; raise the error of reading it."""
        if not self._depth:
            return self._read(key)
        self.expect(key)
        current = self._ahead[0]
        # the wait is on this line, so that stack dumps name it
        value, error = current.outcome.get()
        self._ahead.popleft()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def expect(self, key: K) -> None:
        """Start to read `key` and the keys that follow it."""
        # the consumer took another key than `following` gave, and needs no value read for that one
        while self._ahead and self._ahead[0].key != key:
            self._ahead.popleft().wanted = False
        if not self._ahead and self._depth:
            self._begin(key)
        self._look_ahead()

    def close(self) -> None:
        """End the thread and drop the values read ahead; a later `take` starts again."""
        for read in self._ahead:
            read.wanted = False
        self._ahead.clear()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(CLOSING_S)
            self._thread = None
            # a thread that still hangs must not take the tasks of the next one
            self._tasks = SimpleQueue()

    def _look_ahead(self) -> None:
        while len(self._ahead) < self._depth + 1:
            key = self._following(self._ahead[-1].key) if self._ahead else None
            if key is None:
                return
            self._begin(key)

    def _begin(self, key: K) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks, self._read), name="data ahead", daemon=True
            )
            self._thread.start()
            # `__del__` could run while the interpreter shuts down, when queues are gone
            weakref.finalize(self, self._tasks.put, None)
        read: _Read[K, V] = _Read(key)
        self._ahead.append(read)
        self._tasks.put(read)


def _serve(tasks: SimpleQueue[_Read[K, V] | None], read: Callable[[K], V]) -> None:
    """Serve reads until None arrives; this holds no reference to the prefetcher."""
    while (task := tasks.get()) is not None:
        if not task.wanted:
            continue
        # every error goes to the thread that takes the value; a daemon would lose it
        try:
            task.outcome.put((read(task.key), None))
        except BaseException as error:
            task.outcome.put((None, error))
        # the loop waits here for its next task, and would keep a batch in memory
        del task
