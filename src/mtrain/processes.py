"""Settings of this process: it ends with its parent, and may work without garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent ends for any reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


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
