"""A new file that is written from front to back past the page cache, where the file system can.

Needs no torch.

Finding pages for gigabytes that nobody reads soon takes longer than writing them, and pushes out
what others read.
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
    """A file that was not there."""

    def __init__(self, path: Path, head_bytes: int) -> None:
        """`head_bytes`: what is left out at the front, until `finish`."""
        self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._blocks = deque(memoryview(mmap(-1, BLOCK_BYTES)) for _ in range(BLOCKS))
        self._held = head_bytes % BLOCK_BYTES
        self._at = head_bytes - self._held
        self._thread = ThreadPoolExecutor(1)
        self._writing = Future[None]()
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
                if error.errno != errno.EINVAL or not self._past_cache(False):
                    raise
                continue
            data = data[count:]
            at = at + count

    def _past_cache(self, wanted: bool) -> bool:
        """Return whether that was another way than before."""
        flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
        other = flags | _PAST_CACHE if wanted else flags & ~_PAST_CACHE
        try:
            fcntl.fcntl(self._number, fcntl.F_SETFL, other)
        except OSError:  # a file system that knows no other way than through the cache
            return False
        return other != flags
