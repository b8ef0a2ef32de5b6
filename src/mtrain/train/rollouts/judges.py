"""Rewards and environments of sampled answers, in processes with limits of time and memory."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from mtrain import strict_json
from mtrain.train.rewards import Sampled
from mtrain.units import GIB

STARTING_S = 60.0
"""Most seconds in which a process imports a function."""


@dataclass(frozen=True)
class Verdict:
    """The reward of an answer by one function."""

    value: float
    """NaN if it failed."""
    why: str = ""
    """Reason of a failure."""


class Judges:
    """Processes that compute rewards; one that exceeds a limit is replaced."""

    def __init__(self, workers: int, seconds: float, memory_gib: float) -> None:
        self._seconds = seconds
        self._memory = int(memory_gib * GIB)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(_Process(self._memory))

    def verdicts(self, names: Sequence[str], answers: Sequence[Sampled]) -> list[list[Verdict]]:
        """Return the verdict of each function on each answer, by answer."""
        asked = [("reward", name, asdict(answer)) for answer in answers for name in names]
        found = [
            Verdict(one.get("value", math.nan), one.get("why", ""))
            for one in self._pool.map(self._asked, asked)
        ]
        rows = iter(found)
        return [[next(rows) for _ in names] for _ in answers]

    def replies(
        self, environment: str, talks: Sequence[tuple[list[Any], Mapping[str, Any]]]
    ) -> list[tuple[list[Any] | None, str]]:
        """Return what an environment writes after each conversation with the line of its prompt:
        messages, None where the answer ends, and why it failed.
        """
        asked = [
            ("environment", environment, {"messages": messages, "columns": dict(columns)})
            for messages, columns in talks
        ]
        found = self._pool.map(self._asked, asked)
        return [(one.get("messages"), one.get("why", "")) for one in found]

    def _asked(self, asked: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
        # As many threads as processes: one is always idle here.
        process = self._idle.get()
        try:
            found = process.answer(*asked, self._seconds)
        finally:
            if process.ended:
                process.end()
                process = _Process(self._memory)
            self._idle.put(process)
        return found

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().end()


class _Process:
    """A process of `mtrain.train.rollouts.judge`."""

    def __init__(self, memory: int) -> None:
        command = [sys.executable, "-m", "mtrain.train.rollouts.judge", str(os.getpid())]
        # A new interpreter: a fork of a rank would share its device and its threads.
        self._child = subprocess.Popen(
            [*command, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._loaded: set[tuple[str, str]] = set()
        self.ended = False

    def answer(self, kind: str, name: str, given: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return what a function returned, or `why` it failed; the process is `ended` if it took
        too long or died.
        """
        asked = {"kind": kind, "name": name}
        # A limit that covers imports, too, would let an answer take that much longer.
        if (kind, name) not in self._loaded:
            found = self._answer(asked, STARTING_S)
            if "why" in found:
                return found
            self._loaded.add((kind, name))
        return self._answer({**asked, "given": given}, seconds)

    def _answer(self, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the process, or `why` it has none."""
        assert self._child.stdin is not None
        line = strict_json.dumps(asked).encode() + b"\n"
        begun = time.monotonic()
        try:
            self._child.stdin.write(line)
            answer = self._line(begun + seconds)
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self.ended = True
            late = time.monotonic() - begun >= seconds
            return {"why": f"it took more than {seconds:g} s" if late else "its process died"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _line(self, deadline: float) -> bytes:
        assert self._child.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, left))
            part = self._child.stdout.read(1 << 16) if ready else b""
            if not part:
                break
            line += part
        return line

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child.wait()
