"""Watching the ranks of a local run: the first failure is named, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mtrain.errors import BadEnvironment, Damaged, MtrainError, Preempted, TrainingFault
from mtrain.launching.worker import record_name

GRACE_S = 0.5
"""After a first death, how long its peers may take to record what they saw."""
END_S = 3.0
"""After SIGTERM, how long a rank may take before SIGKILL."""

ERRORS = {error.exit_code: error for error in (BadEnvironment, Damaged, TrainingFault)}


@dataclass
class Ended:
    """How a rank's process ended."""

    rank: int
    status: int

    @property
    def signal(self) -> int | None:
        """The signal that ended it, if one did."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    @property
    def code(self) -> int:
        """Its exit code, 128 + signal for a signal."""
        return 128 + self.signal if self.signal is not None else os.WEXITSTATUS(self.status)


class Supervisor:
    """Waits for forked ranks; forwards a stop; ends all when one fails."""

    def __init__(self, pids: dict[int, int], errors: Path) -> None:
        self.ranks = pids
        """Process id -> rank, of those that still run."""
        self.errors = errors
        self.ended: list[Ended] = []
        self.stops = 0

    def start(self, fork: Callable[[int], int], ranks: int) -> None:
        """Fork every rank; a stop that is asked in between reaches those that exist."""
        for rank in range(ranks):
            self.ranks[fork(rank)] = rank

    def wait(self) -> None:
        """Until every rank has ended.

        Raises:
            MtrainError: of the kind that the first failing rank ended with, naming that rank.
            Preempted: all ranks stopped on request.
            KeyboardInterrupt: a stop was asked twice.
        """
        previous = {s: signal.signal(s, self._on_stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.ranks and not self._failed():
                self._reap(block=True)
            if self.ranks:
                self._reap_for(GRACE_S)
            failed = self._failed()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.stops > 1:
            raise KeyboardInterrupt
        if self.stops and all(e.signal == signal.SIGTERM for e in failed):
            raise Preempted("stopped on request; go on with checkpoint.resume=latest")
        if failed:
            raise self._cause(failed)

    def _end_all(self) -> None:
        """Ask every rank that still runs to end, then make it."""
        self._signal(signal.SIGTERM)
        self._reap_for(END_S)
        self._signal(signal.SIGKILL)
        while self.ranks:
            self._reap(block=True)

    def _failed(self) -> list[Ended]:
        return [e for e in self.ended if e.code not in (0, Preempted.exit_code)]

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        self._signal(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in list(self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self, *, block: bool) -> bool:
        """Collect one rank that has ended; False if none has."""
        try:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            self.ranks.clear()
            return False
        if pid in self.ranks:
            self.ended.append(Ended(self.ranks.pop(pid), status))
        return pid != 0

    def _reap_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.ranks and time.monotonic() < deadline:
            if not self._reap(block=False):
                time.sleep(0.01)

    def _cause(self, failed: list[Ended]) -> MtrainError:
        """The first failing rank: a process that was killed from outside, else the earliest error of its own."""
        records = {e.rank: self._record(e.rank) for e in failed}
        killed = [e for e in failed if e.signal is not None and records[e.rank] is None]
        if killed:
            first = killed[0]
            name = signal.Signals(first.signal or 0).name
            return TrainingFault(f"rank {first.rank} was ended by {name}; {self._where()}")
        own = [r for r in records.values() if r and not r["peer_lost"]]
        seen = own or [r for r in records.values() if r]
        if not seen:
            first = failed[0]
            return TrainingFault(f"rank {first.rank} ended with exit code {first.code} and left no record")
        cause = min(seen, key=lambda r: r["time"])
        kind = ERRORS.get(cause["exit_code"], TrainingFault)
        if cause["expected"]:
            return kind(f"rank {cause['rank']}: {cause['message']}")
        summary = cause["message"].strip().splitlines() or [""]
        return TrainingFault(
            f"rank {cause['rank']} failed first: {cause['kind']}: {summary[0]}; {self._where(cause['rank'])}"
        )

    def _record(self, rank: int) -> dict[str, Any] | None:
        path = self.errors / record_name(rank)
        return json.loads(path.read_text()) if path.is_file() else None

    def _where(self, rank: int | None = None) -> str:
        file = self.errors / record_name(rank) if rank is not None else self.errors
        return f"details in {file}; go on with checkpoint.resume=latest"
