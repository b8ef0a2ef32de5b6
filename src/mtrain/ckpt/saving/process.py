"""The writer of a rank as the rank sees it: its process, its messages, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain.ckpt.saving import staging
from mtrain.ckpt.saving.channel import Channel, Closed
from mtrain.ckpt.saving.staging import Staging

MODULE = "mtrain.ckpt.saving.writer"
SILENT_S = 5.0
"""Seconds without a sign of life, work or a call to the disk, after which a writer is hanging."""


class WriterProcess:
    """A writer that was started."""

    def __init__(self, timeout_s: float) -> None:
        """Start it; `timeout_s`: the time that one call to the disk may take.

        Raises:
            OSError: no process can be started.
        """
        self.memory = Staging.create()
        self._timeout_s = timeout_s
        mine, theirs = socket.socketpair()
        modules = os.pathsep.join(path for path in sys.path if path)
        inherited = (theirs.fileno(), self.memory.descriptor)
        try:
            # Executed, never forked: this process may hold a device, and sockets of its groups.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(os.getpid()), *map(str, inherited)],
                pass_fds=inherited,
                # a terminal's Ctrl-C reaches the launcher only
                process_group=0,
                env={**os.environ, "PYTHONPATH": modules},
            )
        except OSError:
            mine.close()
            self.memory.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(mine)
        self._given_back = False
        self._seen = (-1, time.monotonic())
        """The last count of signs of life, and when it changed."""

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def problem(self) -> str:
        """Return in words how it ended, or that it hangs; empty while it is well."""
        # `waitpid` also tells of a process that was stopped, which would never answer.
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                name = signal.Signals(os.WSTOPSIG(status)).name
                return f"was stopped by {name}"
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
        code = self._process.returncode
        if code is not None:
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            return f"ended with {how}"
        return self._silence()

    def _silence(self) -> str:
        """Return that it hangs, if it does."""
        counters = self.memory.counters
        now = time.monotonic()
        ticks = counters[staging.TICKS]
        if ticks != self._seen[0]:
            self._seen = (ticks, now)
        silent_s = now - self._seen[1]
        phase = counters[staging.PHASE]
        if phase in (staging.IDLE, staging.FOR_RANK):
            self._seen = (ticks, now)
            return ""
        # A process that waits for a core or a disk is slow; one that sleeps on its own is stuck.
        limit_s = self._timeout_s
        if phase == staging.WORKING and _state(self.pid) == "S":
            limit_s = min(SILENT_S, limit_s)
        return f"has not responded for {silent_s:.0f} s" if silent_s > limit_s else ""

    def messages(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the messages that have come; wait for the first one for at most `wait_s`."""
        found = []
        with suppress(Closed):
            while (message := self.channel.receive(wait_s)) is not None:
                found.append(message)
                wait_s = 0.0
        return found

    def kill(self) -> None:
        """End it at once, whatever it does, and give everything back, once."""
        if self._given_back:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._collect()

    def close(self) -> None:
        """Let it end: it has nothing left to do."""
        if self._given_back:
            return
        self.channel.close()
        deadline = time.monotonic() + SILENT_S
        while self._process.returncode is None and time.monotonic() < deadline:
            if self.problem():
                break
            time.sleep(0.002)
        self.kill()

    def _collect(self) -> None:
        if self._process.returncode is None:
            with suppress(ChildProcessError):
                _, status = os.waitpid(self.pid, 0)
                self._process.returncode = os.waitstatus_to_exitcode(status)
        self.channel.close()
        self.memory.close()
        self._given_back = True


def _state(pid: int) -> str:
    """Return the letter of a process's state: R runs or may run, S sleeps, D waits for a disk."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # not Linux
        return ""
    return text.rpartition(")")[2].split()[0]
