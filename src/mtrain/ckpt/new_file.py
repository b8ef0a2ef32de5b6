"""New safetensors files, written tensor by tensor from front to back, with the header at the end.

Needs no torch. Files are written with direct I/O, if the file system has it: page-cache pages for
gigabytes that are not read soon take longer than the write, and evict pages that other processes
use.

Source: the format's specification, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.ckpt.hashes import LENGTH_BYTES, WIDTHS

ALIGNMENT = 8
MAX_ENTRY_BYTES = 256
"""The most bytes of a tensor's entry in a header, without its name."""


class Writer:
    """A new safetensors file whose tensors are written one after the other, in the order in which
    they are named. Its header follows at the end, into room that is left for it: shapes and hashes
    need not be known before.
    """

    def __init__(
        self,
        path: Path,
        names: Iterable[str],
        metadata_bytes: int = 256,
        source: Ring | None = None,
    ) -> None:
        """Reserve room for metadata of at most `metadata_bytes`, as JSON. With `source`, added
        bytes are the next ones of that ring.
        """
        self.path = path
        self._names = deque(names)
        self._entries: dict[str, Any] = {}
        self._data_at = data_offset(self._names, metadata_bytes)
        self._at = 0
        self._missing = 0
        """Bytes of the tensor that was begun last which were not added."""
        self._file: NewFile
        if source is None:
            self._file = NewFile(path, self._data_at)
        else:
            self._file = RingFile(path, self._data_at, source)

    def write(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> None:
        """Write the bytes of the next tensor.

        Raises:
            ValueError: another one is next, or it has another size.
        """
        if len(data) != prod(shape) * WIDTHS[dtype]:
            raise ValueError(f"{name} of {len(data)} bytes is not what follows in {self.path}")
        self.begin(name, dtype, shape)
        self.add(data)

    def begin(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Begin the next tensor, whose bytes `add` writes.

        Raises:
            ValueError: another one is next, or the one before lacks bytes.
        """
        if not self._names or name != self._names[0] or self._missing:
            raise ValueError(f"{name} is not what follows in {self.path}")
        self._names.popleft()
        self._missing = prod(shape) * WIDTHS[dtype]
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [self._at, self._at + self._missing],
        }

    def add(self, data: memoryview) -> None:
        """Write the next bytes of the tensor that was begun.

        Raises:
            ValueError: it has fewer.
        """
        if len(data) > self._missing:
            raise ValueError(f"{len(data)} bytes are more than follow in {self.path}")
        self._missing -= len(data)
        self._at += len(data)
        self._file.write(data)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header, and put the file on disk.

        Raises:
            ValueError: a tensor was not written, or the header is larger than its room.
            OSError: some of it could not be put on disk.
        """
        if self._names or self._missing:
            lacking = self._names[0] if self._names else "the end of the last tensor"
            raise ValueError(f"{self.path}: {lacking} was not written")
        text = strict_json.dumps(
            {"__metadata__": dict(metadata), **self._entries}, separators=(",", ":")
        ).encode()
        room = self._data_at - LENGTH_BYTES
        if len(text) > room:
            raise ValueError(f"{self.path}: the header has {len(text)} bytes, and room for {room}")
        # spaces fill the room: JSON allows them, and the format's reference does the same
        self._file.finish(room.to_bytes(LENGTH_BYTES, "little") + text.ljust(room))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def data_offset(names: Iterable[str], metadata_bytes: int) -> int:
    """Return the offset of the first tensor's bytes in a file with tensors of these names."""
    # shapes and offsets are at most as long as MAX_ENTRY_BYTES, so that the room suffices
    entries = sum(len(strict_json.dumps(name)) + MAX_ENTRY_BYTES for name in names)
    return LENGTH_BYTES + -(-(metadata_bytes + entries + MAX_ENTRY_BYTES) // ALIGNMENT) * ALIGNMENT


BLOCK_BYTES = 8 << 20
"""Bytes of a write; a multiple of every page size and of every disk's block size."""
PAGE = PAGESIZE
"""A multiple of the alignment that direct I/O requires in memory and in a file."""
WRITES = 4
"""Writes at a time. In memory one core fills pages at 2.5 GB/s, and a fast disk wants a queue."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class NewFile:
    """A new file, written from front to back."""

    def __init__(self, path: Path, head_bytes: int) -> None:
        """Leave `head_bytes` at the front free for `finish`."""
        self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # anonymous mappings begin at a page, as direct I/O demands of memory
        self._blocks = deque([memoryview(mmap(-1, BLOCK_BYTES))])
        """Memory for whole blocks; the first one is filled, and the others are written."""
        self._held = head_bytes % BLOCK_BYTES
        # the first block begins at a multiple of its size, with room for the end of the head
        self._at = head_bytes - self._held
        self._most = WRITES
        """Writes that may be under way."""
        self._threads = ThreadPoolExecutor(WRITES)
        self._writing = deque[Future[None]]()
        self._direct = False
        self._in_blocks = self._set_direct(True)
        if not self._in_blocks:
            self._at = head_bytes
            self._held = 0

    def write(self, data: memoryview) -> None:
        """Add bytes at the end.

        Raises:
            OSError: some that were written before could not be put on disk.
        """
        # A file system in memory: every copy takes as long as the write itself.
        if not self._in_blocks:
            self._put(data, self._at)
            self._at += len(data)
            return
        while len(data):
            count = min(len(data), BLOCK_BYTES - self._held)
            self._blocks[0][self._held : self._held + count] = data[:count]
            data = data[count:]
            self._held = self._held + count
            if self._held == BLOCK_BYTES:
                self._submit(self._put, self._blocks[0], self._at)
                self._next_block()
                self._at = self._at + BLOCK_BYTES
                self._held = 0

    def finish(self, head: bytes) -> None:
        """Write the first bytes, and wait until the file is on disk.

        Raises:
            OSError: some of it could not be put on disk.
        """
        self._await_writes()
        # the last block and the head are not as long as direct I/O demands
        self._set_direct(False)
        self._put(self._blocks[0][: self._held], self._at)
        self._put(memoryview(head), 0)
        os.fsync(self._number)

    def close(self) -> None:
        """Close the file as it is."""
        self._threads.shutdown()
        os.close(self._number)

    def _submit(self, work: Callable[[memoryview, int], None], data: memoryview, at: int) -> None:
        """Let another thread write bytes, and raise an error of an earlier write."""
        self._await_writes(self._most - 1)
        self._writing.append(self._threads.submit(work, data, at))

    def _await_writes(self, most: int = 0) -> None:
        """Wait until at most `most` writes are under way."""
        while len(self._writing) > most:
            self._writing.popleft().result()

    def _next_block(self) -> None:
        """Put memory that no write uses in front."""
        if len(self._blocks) <= WRITES:
            self._blocks.appendleft(memoryview(mmap(-1, BLOCK_BYTES)))
            return
        # One more than can be under way: the block that was filled first is written.
        self._blocks.rotate()

    def _put(self, data: memoryview, at: int) -> None:
        while len(data):
            direct = self._direct
            try:
                count = os.pwrite(self._number, data, at)
            except OSError as error:
                # a file system that accepts the flag may still refuse the write
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)
                continue
            data = data[count:]
            at = at + count

    def _set_direct(self, wanted: bool) -> bool:
        """Switch direct I/O on or off; return whether the file system has it."""
        flags = fcntl.fcntl(self._number, fcntl.F_GETFL)
        other = flags | _DIRECT if wanted else flags & ~_DIRECT
        try:
            fcntl.fcntl(self._number, fcntl.F_SETFL, other)
        except OSError:  # a file system that knows no other way than through the cache
            return False
        self._direct = wanted and bool(_DIRECT)
        return self._direct


@dataclass(frozen=True)
class Ring:
    """Memory that the bytes of a file lie in until they are written, one behind the other, and from
    the front again behind the last.
    """

    memory: memoryview
    """Whole pages."""
    start: int
    """Position of the first of the bytes. Its place in a page is that of its offset in the file."""
    freed: Callable[[int], None]
    """Called with a position before which everything is written, from another thread too."""


class RingFile(NewFile):
    """A new file that is written straight from a ring."""

    def __init__(self, path: Path, head_bytes: int, source: Ring) -> None:
        super().__init__(path, head_bytes)
        self._ring = source
        self._shift = source.start - head_bytes
        """The difference of a position and its offset in the file: whole pages."""
        self._block = max(PAGE, min(BLOCK_BYTES, len(source.memory) // 4 // PAGE * PAGE))
        # The rank copies to the other half of a small ring.
        self._most = max(1, min(WRITES, len(source.memory) // self._block // 2))
        self._at = head_bytes
        self._end = head_bytes
        """The offset behind the last byte that was added."""
        self._front = b""
        """The bytes of the page that the head ends in."""
        self._lock = threading.Lock()
        self._ends = deque[int]()
        """Offsets behind the blocks that are not written yet, or not freed, in order."""
        self._written = set[int]()
        """Those of blocks that are written, behind one that is not."""

    def write(self, data: memoryview) -> None:
        """Add the next bytes of the ring.

        Raises:
            OSError: some that were written before could not be put on disk.
        """
        self._end += len(data)
        while self._end - self._at >= self._block:
            self._write_block(self._block)

    def finish(self, head: bytes) -> None:
        """Write the rest and the first bytes, and wait until the file is on disk.

        Raises:
            OSError: some of it could not be put on disk.
        """
        while (left := self._end - self._at) and (left >= PAGE or self._at % PAGE):
            self._write_block(left // PAGE * PAGE)
        self._await_writes()
        self._set_direct(False)
        self._put(self._bytes(self._end - self._at), self._at)
        self._put(memoryview(head + self._front), 0)
        os.fsync(self._number)
        self._ring.freed(self._end + self._shift)

    def _write_block(self, most: int) -> None:
        """Let another thread write up to the end of the ring, or of the page of the head."""
        first = min(-self._at % PAGE, self._end - self._at)
        if first:
            self._front = bytes(self._bytes(first))
            self._at += first
            return
        data = self._bytes(most)
        with self._lock:
            self._ends.append(self._at + len(data))
        self._submit(self._put_and_free, data, self._at)
        self._at += len(data)

    def _put_and_free(self, data: memoryview, at: int) -> None:
        self._put(data, at)
        with self._lock:
            self._written.add(at + len(data))
            # Memory is freed in order, whichever write ends first.
            while self._ends and self._ends[0] in self._written:
                end = self._ends.popleft()
                self._written.remove(end)
                self._ring.freed(end + self._shift)

    def _bytes(self, count: int) -> memoryview:
        """Return at most `count` bytes from where the next write begins."""
        begin = (self._at + self._shift) % len(self._ring.memory)
        return self._ring.memory[begin : begin + count]
