"""A new file that is written from front to back with direct I/O, if the file system has it.

Page-cache pages for gigabytes that are not read soon take longer than the write, and evict pages
that other processes use.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

BLOCK_BYTES = 8 << 20
"""Written at once; a multiple of what any disk or page size asks for."""
BLOCKS = 2
"""One is filled while the other is written."""
_PAST_CACHE: int = getattr(os, "O_DIRECT", 0)


class NewFile:
    """A new file, written from front to back."""

    def __init__(self, path: Path, head_bytes: int) -> None:
        """Leave `head_bytes` at the front free for `finish`."""
        self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # anonymous mappings begin at a page, as direct I/O demands of memory
        self._blocks = deque(memoryview(mmap(-1, BLOCK_BYTES)) for _ in range(BLOCKS))
        self._held = head_bytes % BLOCK_BYTES
        # the first block begins at a multiple of its size, with room for the end of the head
        self._at = head_bytes - self._held
        self._thread = ThreadPoolExecutor(1)
        self._writing = Future[None]()
        # nothing has to be waited for at first
        self._writing.set_result(None)
        self._past_cache(True)

    def write(self, data: memoryview) -> None:
        """Add bytes at the end.

        Raises:
            OSError: some that were written before could not be put on disk.
        """
        while len(data):
            count = min(len(data), BLOCK_BYTES - self._held)
            self._blocks[0][self._held : self._held + count] = data[:count]
            data = data[count:]
            self._held = self._held + count
            if self._held == BLOCK_BYTES:
                # one write at a time: the other block is filled meanwhile, and an error is raised
                # here
                self._writing.result()
                self._writing = self._thread.submit(self._put, self._blocks[0], self._at)
                self._blocks.rotate()
                self._at = self._at + BLOCK_BYTES
                self._held = 0

    def finish(self, head: bytes) -> None:
        """Write the first bytes, and wait until the file is on disk.

        Raises:
            OSError: some of it could not be put on disk.
        """
        self._writing.result()
        # the last block and the head are not as long as direct I/O demands
        self._past_cache(False)
        self._put(self._blocks[0][: self._held], self._at)
        self._put(memoryview(head), 0)
        os.fsync(self._number)

    def close(self) -> None:
        """Close the file as it is."""
        self._thread.shutdown()
        os.close(self._number)

    def _put(self, data: memoryview, at: int) -> None:
        while len(data):
            try:
                count = os.pwrite(self._number, data, at)
            except OSError as error:
                # a file system that accepts the flag may still refuse the write
                if error.errno != errno.EINVAL or not self._past_cache(False):
                    raise
                continue
            data = data[count:]
            at = at + count

    def _past_cache(self, wanted: bool) -> bool:
        """Switch direct I/O on or off; return whether that changed anything."""
        flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
        other = flags | _PAST_CACHE if wanted else flags & ~_PAST_CACHE
        try:
            fcntl.fcntl(self._number, fcntl.F_SETFL, other)
        except OSError:  # a file system that knows no other way than through the cache
            return False
        return other != flags
