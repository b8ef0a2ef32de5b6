"""Processes that work on units, whose results come back in the order of the units."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType
from typing import Any, TypeVar

from mtrain.data.preprocess.encoder import OtherIds
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError, Problem, of_the_place
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


_made: Any = None
"""In a process of a pool: what `make` made."""


class Pool:
    """`workers` processes that each make something once, with `make(job)`, and then call its methods.

    Nothing heavy is loaded in this process. Used as a context; a process that dies is a BadEnvironment.
    """

    def __init__(self, workers: int, make: Callable[[Any], Any], job: Any) -> None:
        self.workers = workers
        context = get_context("fork" if sys.platform == "linux" else "spawn")
        self._pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), make, job))

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """The value of a function of the made thing and arguments, from one of the processes."""
        return _value(self._submit(function, arguments), "")

    def each(
        self, function: Callable[[Any, Any], T], items: Iterable[Any], say: Callable[[Any], str]
    ) -> Iterator[tuple[Any, T]]:
        """Each item and what a function made of it, in order; a few are worked on ahead. `say` names an item."""
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
        try:
            return self._pool.submit(_call, function, arguments)
        except BrokenProcessPool:
            raise _died("") from None


def _value(future: Future[Any], name: str) -> Any:
    try:
        value = future.result()
    except BrokenProcessPool:
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


def _begin(parent: int, make: Callable[[Any], Any], job: Any) -> None:
    global _made
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    gc.disable()  # what is made lives as long as a unit; lists of pieces would be looked through again and again
    _made = _caught(make, (job,))
    gc.freeze()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if isinstance(_made, _Failed):
        return _made
    gc.collect()
    return _caught(function, (_made, *arguments))


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
        return _Failed("MtrainError", (f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}",))
