"""Worker processes that encode chats: a template is a foreign program, which may never end.

Each process has a limit on time and memory, and notes which chat it works on before it starts. Its
results are bytes of a fixed format, without code.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, BinaryIO

import numpy as np

from mtrain.data.chats.loss_mask import EncodedChat
from mtrain.data.chats.messages import NotJson
from mtrain.data.store.json_lines import JsonLines
from mtrain.errors import BadEnvironment, CorruptData, MtrainError
from mtrain.units import GIB

SECONDS = 20
"""Time limit of one chat; an ordinary one takes a millisecond."""
MEMORY_BYTES = 2 * GIB
"""Memory that a process may take beyond its size at the start."""
BATCH = 32
"""Chats that one process encodes before it is the turn of the next."""
MOST_PROCESSES = 16
WORTH_A_PROCESS = 512
"""Chats that justify the start of another process."""
MOST_TOKENS = 1 << 26
_HEAD = struct.Struct("<cI")
"""Kind and length of a part. E, or P if tool arguments were parsed: ids of a chat; T: their loss
mask; X and R: a fault, R of a line that is not JSON; N: the end of a line.
"""
Work = Callable[[bytes], Sequence[EncodedChat]]


@dataclass(frozen=True)
class Fault:
    """The fault of a line; a line that is not JSON may be left out."""

    text: str
    is_not_json: bool


Result = list[EncodedChat] | Fault


def encode_lines(lines: JsonLines, work: Work, most: int | None = None) -> Iterator[Result]:
    """Yield the result of `work` for every line, in order, from as many processes as cores.

    Raises:
        CorruptData: a line took too much time or memory, with its place.
    """
    cores = len(os.sched_getaffinity(0))
    count = max(
        1, min(cores, MOST_PROCESSES, len(lines) // WORTH_A_PROCESS, most or MOST_PROCESSES)
    )
    writers: list[_Writer] = []
    try:
        for index in range(count):
            writers.append(_Writer(lines, work, index, count))
        for first in range(0, len(lines), BATCH):
            writer = writers[first // BATCH % count]
            for number in range(first, min(first + BATCH, len(lines))):
                yield writer.result(number)
    finally:
        for writer in writers:
            writer.end()


class _Writer:
    """A process that encodes every `count`-th batch of lines from batch `index` on."""

    def __init__(self, lines: JsonLines, work: Work, index: int, count: int) -> None:
        self.lines = lines
        self._at = mmap(-1, 8)
        read_end, write_end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            raise BadEnvironment(
                f"a worker process cannot be started: {error.strerror or error}"
            ) from None
        if self.pid == 0:
            os.close(read_end)
            _run(lines, work, range(index * BATCH, len(lines), count * BATCH), self._at, write_end)
        os.close(write_end)
        self.pipe: BinaryIO = os.fdopen(read_end, "rb")

    def result(self, number: int) -> Result:
        """Return the result of a line."""
        out: list[EncodedChat] = []
        while True:
            kind, body = self._part()
            if kind == b"N":
                return out
            if kind in b"XR":
                return Fault(body.decode("utf-8", "replace"), kind == b"R")
            known, learned = self._part()
            ids = np.frombuffer(body, "<i4").astype(np.int64)
            if kind not in (b"E", b"P") or known != b"T" or len(learned) != len(ids):
                raise self._died(number)
            out.append(EncodedChat(ids, np.frombuffer(learned, np.uint8) != 0, kind == b"P"))

    def _part(self) -> tuple[bytes, bytes]:
        head = self.pipe.read(_HEAD.size)
        if len(head) == _HEAD.size:
            kind, size = _HEAD.unpack(head)
            body = self.pipe.read(size) if size <= 4 * MOST_TOKENS else b""
            if len(body) == size:
                return kind, body
        raise self._died(int.from_bytes(self._at[:8], "little"))

    def _died(self, number: int) -> MtrainError:
        place = self.lines.place(min(number, len(self.lines) - 1))
        return CorruptData(
            f"{place}: to write this chat takes more than {SECONDS} s or"
            f" {MEMORY_BYTES // GIB} GiB; another data.chat_template, or a shorter chat"
        )

    def end(self) -> None:
        """Kill the process, finished or not."""
        self.pipe.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _run(lines: JsonLines, work: Work, firsts: range, at: mmap, write_end: int) -> None:
    """Encode the batches of a worker process, write the results to its pipe, and exit."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, _too_long)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _bound_memory()
        with os.fdopen(write_end, "wb") as pipe:
            for first in firsts:
                for number in range(first, min(first + BATCH, len(lines))):
                    at[:8] = number.to_bytes(8, "little")
                    result = _bounded(work, lines.line(number))
                    _send(pipe, result)
                    if isinstance(result, Fault):
                        # it may end the whole run, and the next line may take long
                        pipe.flush()
                pipe.flush()
        code = 0
    except BaseException:  # the reader sees the end of the pipe and the line in `at`
        code = 1
    finally:
        os._exit(code)


def _bounded(work: Work, line: bytes) -> Result:
    """Return the result of a line within `SECONDS`.

    Code that no signal interrupts is killed by the limit on CPU time a bit later.
    """
    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time()) + 2 * SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (_within(limit, hardest), hardest))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return list(work(line))
    except MemoryError:
        return Fault(f"to write this chat takes more than {MEMORY_BYTES // GIB} GiB", False)
    except MtrainError as error:
        return Fault(str(error), isinstance(error, NotJson))
    except Exception as error:
        return Fault(f"it cannot be written: {type(error).__name__}: {error}", False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send(pipe: BinaryIO, result: Result) -> None:
    if isinstance(result, Fault):
        body = result.text.encode("utf-8", "backslashreplace")[:4000]
        pipe.write(_HEAD.pack(b"R" if result.is_not_json else b"X", len(body)) + body)
        return
    for one in result:
        ids = one.ids.astype("<i4").tobytes()
        learned = one.learned.tobytes()
        pipe.write(
            _HEAD.pack(b"P" if one.parsed else b"E", len(ids))
            + ids
            + _HEAD.pack(b"T", len(learned))
            + learned
        )
    pipe.write(_HEAD.pack(b"N", 0))


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_within(now + MEMORY_BYTES, hardest), hardest))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _within(limit: int, hardest: int) -> int:
    """Return a limit that is within the hard limit of the process."""
    return limit if hardest == resource.RLIM_INFINITY else min(limit, hardest)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")
