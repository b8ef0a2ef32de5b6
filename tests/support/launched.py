"""The command line in processes of their own, forked from the test's process so that nothing is
imported again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from mtrain import startup
from mtrain.processes import die_with
from tests.support.commands import latest
from tests.support.forked import import_engine
from tests.support.patience import patient

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launched:
    """A process that runs `mtrain ARGV` in the folder `cwd`, after `patch`; what it prints goes to
    a file there.

    It is the command as a shell starts it, without the seconds of imports: those are made once, in
    this process.
    """

    def __init__(
        self,
        *argv: str,
        cwd: Path,
        environment: dict[str, str] | None = None,
        patch: Callable[[], None] | None = None,
        apart: Path | None = None,
        engine: bool = True,
    ) -> None:
        """Start the command; with `apart`, output and errors are two files in that folder.

        Without `engine`, the command imports it itself if it needs it.
        """
        if engine:
            import_engine()
        self.output = (apart or cwd) / f"output-{len(list((apart or cwd).glob('output-*')))}.txt"
        self.errors = self.output.with_suffix(".err") if apart else self.output
        self.output.touch()
        self.errors.touch()
        self.began = time.monotonic()
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with(parent)
                self._become(cwd, environment or {})
                if patch is not None:
                    patch()
                from mtrain.cli.main import main

                code = main(latest(*argv))
                sys.stdout.flush()
            finally:
                os._exit(code)

    def _become(self, cwd: Path, environment: dict[str, str]) -> None:
        os.setsid()
        startup.begin()  # as a command of a shell does
        os.chdir(cwd)
        for name in LAUNCHER:
            os.environ.pop(name, None)
        os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment})
        for number, path in ((1, self.output), (2, self.errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )

    @property
    def said(self) -> str:
        """Return the output so far."""
        return self.output.read_text()

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes that it forked, by rank; [] before all have started or after
        their end.
        """
        return sorted(psutil.Process(self.pid).children(), key=lambda child: child.pid)

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.seconds = time.monotonic() - self.began
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float = 120) -> int:
        """Wait for its end; return its exit code."""
        deadline = time.monotonic() + patient(timeout_s)
        while time.monotonic() < deadline:
            if (code := self.poll()) is not None:
                return code
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"still running after {timeout_s:g} s:\n{self.said}")

    def kill(self) -> None:
        """End the process and all its children, unless it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def mtrain(
    *argv: str, cwd: Path, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `commands.mtrain` does, without its imports."""
    with tempfile.TemporaryDirectory() as folder:
        run = Launched(*argv, cwd=cwd, environment=environment, apart=Path(folder))
        code = run.wait(timeout_s)
        return subprocess.CompletedProcess(list(argv), code, run.said, run.errors.read_text())


def light(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that needs no engine to its end, in a process forked from this one as it is."""
    with tempfile.TemporaryDirectory() as folder:
        run = Launched(*argv, cwd=cwd, apart=Path(folder), engine=False)
        code = run.wait()
        return subprocess.CompletedProcess(list(argv), code, run.said, run.errors.read_text())


def as_rank(rank: int, size: int, port: int, **more: str) -> dict[str, str]:
    """Return the environment of one rank on this machine as a launcher sets it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }
