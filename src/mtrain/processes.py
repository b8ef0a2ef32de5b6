"""Settings of this process: it ends with its parent, and may work without garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
RETRY_S = 1.0
"""The pause before the first further try; each one after it is twice as long."""
LONGEST_RETRY_S = 60.0


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent ends for any reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def in_background(parent: int, command: Sequence[str]) -> NoReturn:
    """Become a command that yields to all others and ends with `parent`.

    Where memory runs out, the kernel ends it before any other process (Linux only).
    """
    die_with(parent)
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.execv(command[0], list(command))


def kill(child: int) -> None:
    """End a child process, whatever it does, unless it was collected before."""
    # A supervisor may have collected it: its id may be that of another process by then.
    with suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def guarded(work: Callable[[], None], ended: Callable[[str], None]) -> None:
    """Work in a child process until it ends by itself, in another one if something kills it.

    `ended` is called with the end of a child that was killed or failed.
    """
    guard = os.getpid()
    pause_s = RETRY_S
    while True:
        pid = os.fork()
        if pid == 0:
            die_with(guard)
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not status:
            return
        code = os.waitstatus_to_exitcode(status)
        ended(f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_RETRY_S)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disable Python's garbage collector in this block.

    A collection goes through millions of records again and again. Use it to read much at once, or
    in a process that ends before garbage has gathered.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
