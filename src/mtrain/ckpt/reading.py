"""Bytes of open files, read into memory of their own. Needs no torch."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

from mtrain.durable import not_read
from mtrain.errors import CorruptData
from mtrain.world.heartbeat import tick

READ_BYTES = 1 << 24
"""The most that is read by one call."""
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
MAPPED_BYTES = 1 << 20
"""The least size of memory that is mapped and not taken from the heap."""
GIVEN_BACK = 0x80 if sys.platform == "linux" else 0
"""RWF_DONTCACHE, from Linux 6.14 on."""


def read_at(path: Path, file: int, at: int, size: int, *, once: bool = False) -> memoryview:
    """Read bytes of an open file into memory of their own; `once`: see `read_once`.

    Raises:
        CorruptData: it ends before, or the disk gives an error.
    """
    out = _memory(size)
    done = 0
    try:
        while done < size:
            part = out[done : done + READ_BYTES]
            count = read_once(file, part, at + done) if once else os.preadv(file, [part], at + done)
            # a file that was cut: the length in its header is of the whole one
            if not count:
                raise CorruptData(f"{path} is not what was written: it is cut")
            done += count
            # between calls: one large read of a network disk may take minutes
            tick()
    except OSError as error:
        raise not_read(path, error) from None
    return out


def read_once(file: int, buffer: memoryview, at: int) -> int:
    """Read bytes that are not needed again soon into a buffer; return their number.

    The kernel drops their pages from its cache, if it can: other files need them more.
    """
    try:
        return os.preadv(file, [buffer], at, GIVEN_BACK)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return os.preadv(file, [buffer], at)


def _memory(size: int) -> memoryview:
    """Return memory to read into.

    A large bytearray would be filled with zeros first, while no other thread runs.
    """
    if size < MAPPED_BYTES:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(HUGE_PAGES)
    return memoryview(memory)
