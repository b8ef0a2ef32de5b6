"""Processes that work on units, whose results come back in the order of the units."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from mtrain.data.preprocess.encoders.base import OtherIds
from mtrain.errors import (
    BadEnvironment,
    ConfigError,
    CorruptData,
    MtrainError,
    Problem,
    of_the_place,
)
from mtrain.processes import die_with

T = TypeVar("T")
AHEAD = 2
"""Units that wait for each process, so that none is idle."""


@dataclass(frozen=True)
class _Failed:
    """An error of another process: exceptions with their own arguments do not travel."""

    kind: str
    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def error(self) -> MtrainError:
        if self.kind == "ConfigError":
            return ConfigError(self.problems)
        kinds = {"CorruptData": CorruptData, "OtherIds": OtherIds, "BadEnvironment": BadEnvironment}
        return kinds.get(self.kind, MtrainError)(*self.lines)


class _Process:
    """A process that makes something when it is first asked, and then calls functions of it, one at
    a time.
    """

    def __init__(self, make: Callable[[Any], Any], job: Any) -> None:
        context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid(), make, job), daemon=True
        )
        self._process.start()
        theirs.close()  # else the end of the process would not end the pipe

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the value of a function of the made thing and arguments; EOFError or OSError where
        the process is gone.
        """
        self._pipe.send((function, arguments))
        return self._pipe.recv()

    def end(self, *, at_once: bool) -> None:
        """End it, after the call that it works on unless `at_once`."""
        if at_once:
            self._process.kill()
        else:
            with suppress(OSError):
                self._pipe.send(None)
        self._process.join()


class Pool:
    """`workers` processes that each make something once, with `make(job)`, and then call its
    methods.

    Nothing heavy is loaded in this process. Used as a context; a process that dies is a
    BadEnvironment. A thread waits for each process at its pipe: queues between processes would need
    semaphores, and those a /dev/shm.
    """

    def __init__(self, workers: int, make: Callable[[Any], Any], job: Any) -> None:
        self.workers = workers
        try:
            # before any thread is there
            self._processes = [_Process(make, job) for _ in range(workers)]
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise BadEnvironment(
                f"{workers} processes cannot be started: {why}", "  fix: workers=N, fewer"
            ) from None
        self._idle = SimpleQueue[_Process]()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for process in self._processes:
                process.end(at_once=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.end(at_once=False)

    def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the value of a function of the made thing and arguments, from one of the
        processes.
        """
        return _value(self._submit(function, arguments), "")

    def each(
        self, function: Callable[[Any, Any], T], items: Iterable[Any], say: Callable[[Any], str]
    ) -> Iterator[tuple[Any, T]]:
        """Yield each item and what a function made of it, in order; a few are worked on ahead.

        `say` names an item.
        """
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        for item in items:
            waiting.append((item, self._submit(function, (item,))))
            if len(waiting) > self.workers * AHEAD:
                first, future = waiting.popleft()
                yield first, _value(future, say(first))
        while waiting:
            first, future = waiting.popleft()
            yield first, _value(future, say(first))

    def _submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        return self._threads.submit(self._call, function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        process = self._idle.get()
        try:
            return process.call(function, arguments)
        finally:
            self._idle.put(process)


def _value(future: Future[Any], name: str) -> Any:
    try:
        value = future.result()
    except (EOFError, OSError):
        raise _died(name) from None
    if isinstance(value, _Failed):
        raise value.error()
    return value


def _died(name: str) -> BadEnvironment:
    where = f" near {name}" if name else ""
    return BadEnvironment(
        f"a process that reads{where} was killed: out of memory, or a library ended it",
        "  fix: workers=N, fewer; what was done so far is kept, and the same command goes on",
    )


def _serve(pipe: Connection, parent: int, make: Callable[[Any], Any], job: Any) -> None:
    """Serve calls in a worker process until the pipe closes."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    made: Any = None
    with suppress(EOFError):
        while asked := pipe.recv():
            if made is None:
                # what is made lives as long as a unit; lists of pieces would be looked through
                # often
                gc.disable()
                made = _caught(make, (job,))
                gc.freeze()
            gc.collect()
            function, arguments = asked
            pipe.send(made if isinstance(made, _Failed) else _caught(function, (made, *arguments)))


def _caught(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except ConfigError as error:
        return _Failed("ConfigError", problems=error.problems)
    except MtrainError as error:
        return _Failed(type(error).__name__, tuple(str(error).split("\n")))
    except MemoryError:
        return _Failed("BadEnvironment", ("there is not enough memory", "  fix: workers=N, fewer"))
    except Exception as error:  # said in one line, as main does with what nobody expected
        if (of_here := of_the_place(error)) is not None:
            return _Failed("BadEnvironment", tuple(str(of_here).split("\n")))
        return _Failed(
            "MtrainError",
            (f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}",),
        )
