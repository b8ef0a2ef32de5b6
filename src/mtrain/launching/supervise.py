"""The supervisor of a local run's ranks: it names the first failure and ends the other ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mtrain.ckpt import local
from mtrain.ckpt.folder import committed
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.errors import (
    BadEnvironment,
    ConfigError,
    CorruptData,
    DeviceFault,
    MtrainError,
    Preempted,
    TrainingError,
)
from mtrain.launching import signals
from mtrain.launching.worker import record_name, revive
from mtrain.world import fingerprints
from mtrain.world.fingerprints import Fingerprint, Memory
from mtrain.world.stacks import stacks_name

# Seconds that the peers of the first ended rank have to record their errors
GRACE_S = 0.5
# Seconds that the rank at fault has to record its error, after peers have recorded its consequences
CAUSE_S = 3.0
# Seconds that a rank has between SIGTERM and SIGKILL, once another has failed
END_S = 1.0
# Seconds for the stacks of one rank
SAMPLE_S = 3.0
NO_SAMPLER = "py-spy takes the stacks of such a rank (pip install 'mtrain[debug]')"
# No restart mends bad input, a bad environment or damaged data
NOT_RESTARTED = (ConfigError.exit_code, BadEnvironment.exit_code, CorruptData.exit_code)


@dataclass
class Ended:
    """The end of a rank's process."""

    rank: int
    status: int
    at: float = field(default_factory=time.monotonic)
    """The time at which its launcher noticed, on this machine's monotonic clock."""

    @property
    def signal(self) -> int | None:
        """Return the signal that ended it; None: it exited by itself."""
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None

    @property
    def code(self) -> int:
        """Return the exit code; 128 + the number of a signal."""
        return 128 + self.signal if self.signal is not None else os.WEXITSTATUS(self.status)


@dataclass(frozen=True)
class Failure:
    """The first failure among the ranks of a run."""

    rank: int
    """The rank at fault."""
    kind: str
    """The signal that ended it, the class of its error, or its exit code in words."""
    text: str
    """One line that names the rank that reports it."""
    error: MtrainError
    step: int
    """The step that was being made, from 1; 0: none, or it is unknown."""
    restart_helps: bool
    """True unless a restart would fail for the same reason."""


class Supervisor:
    """Waits for the processes of ranks; forwards a stop; ends all when one fails."""

    def __init__(self, errors: Path, advice: str) -> None:
        """Supervise ranks; `errors`: a run's folder, `advice`: after a checkpoint exists."""
        self.ranks: dict[int, int] = {}
        """Process id -> rank, of the running ranks."""
        self.errors = errors
        self.advice = advice
        self.ended: list[Ended] = []
        self.memory: Memory | None = None
        """The fingerprints of the ranks' collectives, by rank."""
        self.failure: Failure | None = None
        """The first failure, once `wait` has raised it."""
        self.stops = 0
        self.stopped_elsewhere = False
        """True if the launcher of another machine got a request to stop."""
        self.halted = False
        """True if the ranks have to end, whatever their state."""
        self.first = 0
        self.size = 0
        self.unseen: list[int] = []
        """Ranks that hang and whose stacks nothing here can take."""
        self.previous: dict[int, Any] = {}

    def start(self, fork: Callable[[int], int], ranks: int, first: int = 0) -> None:
        """Start so many ranks, from number `first` on.

        A stop in between reaches the started ones, and prevents the others.

        Raises:
            BadEnvironment: a rank could not be started; the started ones are ended.
        """
        self.first = first
        self.size = ranks
        self.previous = signals.replace(self._on_stop)
        try:
            for rank in range(first, first + ranks):
                self.ranks[fork(rank)] = rank
                if self.stops:  # a stop during this rank's start has not reached it
                    self._forward_stop()
        except BaseException as error:
            self._end_all()
            self._restore()
            if not isinstance(error, OSError):
                raise
            raise BadEnvironment(
                f"rank {rank} of {first + ranks} could not be started: {error.strerror or error}",
                "  fix: fewer ranks, or a higher limit of processes (ulimit -u, or of the"
                " container)",
            ) from None

    def wait(self) -> None:
        """Wait until every rank has ended.

        Raises:
            MtrainError: the error of the first failing rank, which it names.
            Preempted: the ranks stopped on request.
            KeyboardInterrupt: the user requested a stop twice.
        """
        try:
            failed = self._of_all(self.watch())
        finally:
            self._restore()
        if self.stops > 1:
            raise KeyboardInterrupt
        # after a stop, ranks that lose their peers fail as well, and that is no failure of the run
        stopped = any(e.code == Preempted.exit_code for e in self.ended)
        asked = self.stops or self.stopped_elsewhere
        if (stopped and not failed) or (
            asked and failed and all(self._stopped_early(e) for e in failed)
        ):
            raise Preempted(self._advised("stopped on request"))
        self.failure = self._lost(failed) or (self._cause(failed) if failed else None)
        if self.failure is not None:
            self._write_collectives()
            raise self.failure.error

    def watch(self) -> list[Ended]:
        """Wait until every rank has ended, ending all once one fails; return the failed ones."""
        try:
            while self.ranks and not (self._failed() or self.halted):
                self._next()
            if self._failed() or self.halted:
                self._announce()
            if self.ranks:
                self._reap_for(GRACE_S)
                if not self.halted:
                    self._reap_for(CAUSE_S, while_=self._lacks_cause)
            failed = self._failed()
            self._sample_stacks(failed)
            return failed
        finally:
            self._end_all()

    def _next(self) -> None:
        """Wait for the end of a rank, or for news of another machine."""
        self._reap(block=True)

    def _announce(self) -> None:
        """Tell other machines that the ranks here end."""

    def _of_all(self, failed: list[Ended]) -> list[Ended]:
        """Return the failed ranks of all machines, in the order of their ends."""
        return failed

    def _lost(self, failed: list[Ended]) -> Failure | None:
        """Return the failure of a machine that was lost; None: all are there."""
        return None

    def _restore(self) -> None:
        signals.restore(self.previous)

    def _stopped_early(self, ended: Ended) -> bool:
        """Return whether a rank ended because of a stop that it or its peer got."""
        record = self._record(ended.rank)
        return ended.signal == signal.SIGTERM or (record is not None and record["peer_lost"])

    def _end_all(self) -> None:
        """Send SIGTERM to every running rank, then SIGKILL."""
        self._signal(signal.SIGTERM)
        self._reap_for(END_S)
        self._signal(signal.SIGKILL)
        while self.ranks:
            self._reap(block=True)

    def _failed(self) -> list[Ended]:
        return [e for e in self.ended if e.code not in (0, Preempted.exit_code)]

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        self._forward_stop()

    def _forward_stop(self) -> None:
        self._signal(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in list(self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self, *, block: bool) -> bool:
        """Collect one ended rank; return False if every rank still runs."""
        try:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:  # a caller that ignores SIGCHLD leaves no children to wait for
            self.ranks.clear()
            return False
        if pid in self.ranks:
            self.ended.append(Ended(self.ranks.pop(pid), status))
        return pid != 0

    def _lacks_cause(self) -> bool:
        """Return whether every failed rank reports the loss of a peer.

        The rank at fault closes its connections before it has recorded its error, or before the
        kernel has torn it down: on a loaded machine its peers end earlier.
        """
        records = [self._record(ended.rank) for ended in self._failed()]
        return bool(records) and all(record and record["peer_lost"] for record in records)

    def _reap_for(self, seconds: float, while_: Callable[[], bool] = lambda: True) -> None:
        deadline = time.monotonic() + seconds
        while self.ranks and while_() and time.monotonic() < deadline:
            if not self._reap(block=False):
                time.sleep(0.01)

    def _cause(self, failed: list[Ended]) -> Failure:
        """Return the first failure: the death of a killed process, or the earliest of the errors
        that are no consequence of another rank's end.

        torch aborts a process whose collective fails or does not end, so an abort counts only if
        there is no other cause.
        """
        records = {e.rank: self._record(e.rank) for e in failed}
        own = [r for r in records.values() if r and not r["peer_lost"]]
        if records[failed[0].rank] not in own:
            silent = [e for e in failed if records[e.rank] is None]
            silent.sort(key=lambda e: e.signal == signal.SIGABRT)
            if silent and not (silent[0].signal == signal.SIGABRT and own):
                # Also those of ranks that are alive, and wait to restart within their processes.
                left = [json.loads(file.read_text()) for file in self.errors.glob("rank_*.json")]
                steps = [r["step"] for r in left]
                return self._death(silent[0], max(steps, default=0))
        return self.first_of([r for r in records.values() if r])

    def first_of(self, records: list[dict[str, Any]]) -> Failure:
        """Return the earliest failure that ranks recorded and that is no consequence of another."""
        own = [r for r in records if not r["peer_lost"]]
        return self._error(min(own or records, key=lambda r: r["time"]))

    def _death(self, ended: Ended, step: int) -> Failure:
        """Return the failure of a rank that left no record, while its peers made `step`."""
        if ended.signal is None:
            kind = f"exit code {ended.code}"
            text = f"rank {ended.rank} ended with {kind} and left no record"
        else:
            kind = signal.Signals(ended.signal).name
            text = f"rank {ended.rank} was ended by {kind}"
        if ended.signal == signal.SIGABRT:
            text += (
                ", as torch does where a collective fails or a thread of its own does: see what it"
                " printed"
            )
        calls = self._collectives()
        where = fingerprints.disagreement(calls)[0] or fingerprints.places(calls)
        more = [f"  collectives: {where}"] if any(calls.values()) else []
        error = TrainingError(self._advised(text), *more)
        helps = ended.signal is not None or ended.code not in NOT_RESTARTED
        return Failure(ended.rank, kind, text, error, step, helps)

    def _error(self, cause: dict[str, Any]) -> Failure:
        """Return the failure that a rank recorded."""
        rank = cause["rank"]
        summary = (cause["message"].strip().splitlines() or [""])[0]
        error: MtrainError
        if cause["expected"]:
            if self.unseen and cause["at_fault"] is not None:
                cause["message"] += f"; {NO_SAMPLER}"
            error = revive(cause, f"rank {rank}: ")
            text = f"rank {rank}: {summary}"
        else:
            text = f"rank {rank} failed first: {cause['kind']}: {summary}"
            # A failed collective does not prove that the ranks called different ones.
            differ, _ = fingerprints.disagreement(self._collectives())
            more = [f"  collectives: {differ}"] if differ else []
            details = f"; details in {self.errors / record_name(rank)}" if self.advice else ""
            error = TrainingError(self._advised(f"{text}{details}"), *more)
        at_fault = rank
        device_fault = cause["kind"] == DeviceFault.__name__
        if cause["at_fault"] is not None:
            at_fault = cause["at_fault"]
            if not device_fault:
                text = f"rank {at_fault} holds the run up: {summary.partition('; stacks: ')[0]}"
        # A restart would use the same device again.
        helps = error.exit_code not in NOT_RESTARTED and not device_fault
        return Failure(at_fault, cause["kind"], text, error, cause["step"], helps)

    def _advised(self, text: str) -> str:
        home = self.errors.parent
        saved = self.advice and (committed(home / CHECKPOINTS) or local.exist(home))
        return f"{text}; {self.advice}" if saved else text

    def _collectives(self) -> dict[int, list[Fingerprint]]:
        """Return the last collectives of each rank, dead and stopped ones included."""
        if self.memory is None:
            return {}
        return {self.first + place: self.memory.read(place) for place in range(self.size)}

    def _sample_stacks(self, failed: Sequence[Ended]) -> None:
        """Write the stacks of ranks that still run after a hang: they may be stopped, or a thread
        holds the lock of Python, so they cannot write them themselves.
        """
        records = filter(None, (self._record(ended.rank) for ended in failed))
        if all(record["at_fault"] is None for record in records):
            return
        for pid, rank in self.ranks.items():
            text = _sampled(pid)
            path = self.errors / stacks_name(rank)
            with suppress(OSError):
                if text:
                    with path.open("a") as file:
                        file.write(text)
                elif not path.is_file() or not path.stat().st_size:
                    self.unseen.append(rank)

    def _write_collectives(self) -> None:
        """Write the last collectives of each rank next to the records of its failure."""
        with suppress(OSError):
            for rank, calls in self._collectives().items():
                if calls and self.errors.is_dir():
                    fingerprints.write(self.errors, rank, calls)

    def _record(self, rank: int) -> dict[str, Any] | None:
        path = self.errors / record_name(rank)
        return json.loads(path.read_text()) if path.is_file() else None


def _sampled(pid: int) -> str:
    """Return the stacks of a process as py-spy reads them; empty without py-spy."""
    folders = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    program = shutil.which("py-spy", path=os.pathsep.join(folders))
    if program is None:
        return ""
    # It may not stop the process: that of a stopped one would wait for ever.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_S)
        return done.stdout if done.returncode == 0 else ""
    return ""
