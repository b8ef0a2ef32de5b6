"""Settings of this process: it ends with its parent, and may work without garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1


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
