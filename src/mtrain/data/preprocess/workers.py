"""Processes that encode units; their results come back in the order of the units."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from mtrain.data.preprocess.encoder import CODES, Encoder, OtherIds, TokenizerSpec
from mtrain.data.preprocess.readers import documents, surrogate_fault
from mtrain.data.preprocess.record import Reading, Rejected, Splitter, splitter
from mtrain.data.preprocess.sources import Part, Source, Unit
from mtrain.data.preprocess.tokenizers import load
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
# Units that wait for each process, so that no process is idle
AHEAD = 2


@dataclass(frozen=True)
class _Failed:
    """An error of another process, since exceptions with arguments of their own cannot be sent."""

    kind: str
    lines: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def error(self) -> MtrainError:
        """Return the error as an exception of this process."""
        if self.kind == "ConfigError":
            return ConfigError(self.problems)
        kinds = {"CorruptData": CorruptData, "OtherIds": OtherIds, "BadEnvironment": BadEnvironment}
        return kinds.get(self.kind, MtrainError)(*self.lines)


class _Process:
    """A process that makes an object with the first call, and applies functions to it in turn."""

    def __init__(self, make: Callable[[Any], Any], job: Any) -> None:
        # a fork shares what is imported; elsewhere, system libraries do not survive it
        context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other_end, os.getpid(), make, job), daemon=True
        )
        self._process.start()
        other_end.close()  # else the end of the process would not end the pipe

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return `function(made object, *arguments)`.

        Raises:
            EOFError, OSError: the process has ended.
        """
        self._pipe.send((function, arguments))
        return self._pipe.recv()

    def end(self, *, at_once: bool) -> None:
        """End the process: after its current call, or `at_once`."""
        if at_once:
            self._process.kill()
        else:
            with suppress(OSError):
                self._pipe.send(None)
        self._process.join()


class Pool:
    """A context with `workers` processes, each of which makes one object with `make(job)`.

    No heavy library is loaded in this process. The death of a process raises BadEnvironment. A
    thread waits for each process at its pipe: queues between processes would need semaphores, and
    those need a /dev/shm.
    """

    def __init__(self, workers: int, make: Callable[[Any], Any], job: Any) -> None:
        self.workers = workers
        try:
            # before this process has threads, which a fork would not copy
            self._processes = [_Process(make, job) for _ in range(workers)]
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise BadEnvironment(
                f"workers={workers}: cannot start so many processes because {why}",
                "  fix: workers=N, fewer",
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
        """Return `function(made object, *arguments)` of one of the processes."""
        return _value(self._submit(function, arguments), "")

    def each(
        self, function: Callable[[Any, Any], T], items: Iterable[Any], say: Callable[[Any], str]
    ) -> Iterator[tuple[Any, T]]:
        """Yield each item with `function(made object, item)`, in order and a few items ahead.

        `say` names an item, for errors.
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
        "  fix: workers=N, fewer; the finished part is kept, and the same command continues it",
    )


def _serve(pipe: Connection, parent: int, make: Callable[[Any], Any], job: Any) -> None:
    """Serve calls in a worker process until the pipe closes."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # one thread: the processes already use all cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    made: Any = None
    with suppress(EOFError):
        while asked := pipe.recv():
            if made is None:
                # A unit makes millions of short-lived objects, which automatic collections would
                # visit again and again; one collection before each unit suffices.
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
    except Exception as error:  # in one line, as `main` reports an unexpected error
        if (fault := of_the_place(error)) is not None:
            return _Failed("BadEnvironment", tuple(str(fault).split("\n")))
        return _Failed(
            "MtrainError",
            (f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}",),
        )


# The counts of each file
COUNTED = (
    "records",
    "documents",
    "empty",
    "sequences",
    "tokens",
    "text_bytes",
    "words",
    "unknown_tokens",
    "unknown_bytes",
)
# Prefix, followed by a key, of the count of records that this key excludes from learning
BY = "rejected_by_"


@dataclass(frozen=True)
class Job:
    """The settings of all processes of a run."""

    spec: TokenizerSpec
    reading: Reading
    sources: tuple[Source, ...]
    dtype: str | None = None
    """None for Megatron's choice by the vocabulary."""
    append_eod: bool = True
    language: str | None = None
    """The language whose sentences documents are split into, if any."""
    keep_newlines: bool = False


@dataclass
class Counted:
    """The counts of a part of a file."""

    source: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    rejected: list[Rejected] = field(default_factory=list)

    def reject(self, one: Rejected) -> None:
        """Leave a record out."""
        self.rejected.append(one)
        for key in one.by:
            self.counts[f"{BY}{key}"] = self.counts.get(f"{BY}{key}", 0) + 1


@dataclass
class Result:
    """The encoded documents of a unit."""

    tokens: bytes
    lengths: bytes
    """int32: tokens of each sequence."""
    sequences: bytes
    """int32: sequences of each document."""
    largest: int
    parts: list[Counted]
    crc: int = 0


class Worker:
    """An encoder of the units of a job.

    Raises:
        ConfigError: documents should end with a token that the tokenizer does not have.
        CorruptData: the tokenizer's files are not a tokenizer.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.encoder = load(job.spec)
        self.dtype = dtype_of(self.encoder, job.dtype)
        self._packer = self.encoder.packer(CODES[self.dtype.name])
        self.engine = self._packer.engine
        self.passed_over = self._packer.passed_over
        self._split: Splitter | None = None
        if job.language is not None:
            self._split = splitter(job.language, job.keep_newlines)
        if job.append_eod and self.encoder.eod is None:
            rule = f"cannot end documents because {job.spec.files[0]} names no token for it"
            raise ConfigError.of(
                "MT608", "eod", True, rule, "eod_token=NAME, or eod=false", "command line"
            )
        self._eod = np.array([self.encoder.eod], self.dtype).tobytes() if job.append_eod else b""

    def run(self, unit: Unit) -> Result:
        """Return the documents of a unit, encoded."""
        out = _Out()
        for part in unit:
            self._part(part, out)
        tokens = b"".join(out.tokens)
        largest = int(np.frombuffer(tokens, self.dtype).max()) if tokens else -1
        lengths = np.array(out.lengths, "<i4").tobytes()
        sequences = np.array(out.sequences, "<i4").tobytes()
        return Result(tokens, lengths, sequences, largest, out.parts, zlib.crc32(tokens))

    def _part(self, part: Part, out: _Out) -> None:
        counted = Counted(part.source)
        out.parts.append(counted)
        texts = list[list[str]]()
        size = 0
        for number, found in documents(part, self.job.sources[part.source], self.job.reading):
            counted.counts["records"] = number
            if found is None:
                continue
            if isinstance(found, Rejected):
                counted.reject(found)
                continue
            if isinstance(found, list):
                text = found
            else:
                text = self._split(found) if self._split else [found]
            try:
                size += sum(len(one.encode()) for one in text)
            except UnicodeEncodeError as error:
                counted.reject(Rejected(number, surrogate_fault(error)))
                continue
            texts.append(text)
            if size >= self._packer.batch_chars:
                counted.counts["text_bytes"] += size
                self._encode(texts, counted, out)
                texts = []
                size = 0
        counted.counts["text_bytes"] += size
        self._encode(texts, counted, out)

    def _encode(self, texts: Sequence[list[str]], counted: Counted, out: _Out) -> None:
        flat = [one for text in texts for one in text]
        packed = self._packer.pack(flat)
        counts = counted.counts
        place = 0
        size = self.dtype.itemsize
        for text in texts:
            # as Megatron-LM's tool, which leaves out sentences without a token, and ends only
            # documents that have tokens
            held = [one for one in packed[place : place + len(text)] if one]
            place += len(text)
            if held:
                held[-1] += self._eod
            out.tokens += held
            lengths = [len(one) // size for one in held]
            out.lengths += lengths
            out.sequences.append(len(held))
            counts["tokens"] += sum(lengths)
            counts["sequences"] += len(held)
            counts["empty"] += not held
        counts["documents"] += len(texts)
        counts["words"] += sum(len(one.split()) for one in flat)
        if self.encoder.unk is not None:
            self._count_unknown(flat, packed, counts)

    def _count_unknown(
        self, texts: Sequence[str], packed: Sequence[bytes], counts: dict[str, int]
    ) -> None:
        found = np.frombuffer(b"".join(packed), self.dtype) == self.encoder.unk
        if not found.any():
            return
        counts["unknown_tokens"] += int(found.sum())
        for text, one in zip(texts, packed, strict=True):
            if (np.frombuffer(one, self.dtype) == self.encoder.unk).any():
                counts["unknown_bytes"] += self.encoder.unknown_bytes(text)


class _Out:
    def __init__(self) -> None:
        self.tokens = list[bytes]()
        self.lengths = list[int]()
        self.sequences = list[int]()
        self.parts = list[Counted]()


def dtype_of(encoder: Encoder, chosen: str | None) -> np.dtype:
    """Return the dtype of tokens: the chosen one, or Megatron's for the vocabulary.

    Raises:
        ConfigError: the chosen dtype cannot hold the ids of the tokenizer.
    """
    from mtrain.data.store.indexed import token_dtype

    if chosen is None:
        return token_dtype(encoder.vocab_size)
    dtype = np.dtype(chosen)
    if encoder.vocab_size - 1 > np.iinfo(dtype).max:
        rule = (
            f"cannot hold all ids because it ends at {np.iinfo(dtype).max}, and the tokenizer has"
            f" ids to {encoder.vocab_size - 1}"
        )
        raise ConfigError.of("MT603", "dtype", chosen, rule, "dtype=int32", "command line")
    return dtype
