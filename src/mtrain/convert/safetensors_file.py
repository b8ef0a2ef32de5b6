"""Safetensors files: headers read without trust, and files written tensor by tensor.

Needs no torch. A file is written from front to back with direct I/O, if the file system has it:
page-cache pages for gigabytes that are not read soon take longer than the write, and evict pages
that other processes use.

Source: the format's specification, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.ckpt.reading import read_once
from mtrain.durable import not_read
from mtrain.errors import CorruptData

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}
"""Number format -> bytes of one number."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit on a header, the same as in the format's own readers."""
MAX_DIMENSIONS = 16
ALIGNMENT = 8
MAX_ENTRY_BYTES = 256
"""The most bytes of a tensor's entry in a header, without its name."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    """Byte of the file."""

    @property
    def width(self) -> int:
        """Return bytes of a number."""
        return BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return prod(self.shape) * self.width

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, which has its size.

        Raises:
            CorruptData: the file ended, or cannot be read.
            BadEnvironment: it may not be read.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                done = 0
                while done < len(buffer):
                    count = read_once(file.fileno(), buffer[done:], self.start + done)
                    if not count:
                        raise CorruptData(f"{self.path}: the file ends within {self.name}")
                    done += count
        except OSError as error:
            raise not_read(self.path, error) from None


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    Raises:
        CorruptData: no such file, or a header that does not describe it exactly.
        BadEnvironment: it may not be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise CorruptData(f"{path} is no plain file")
        size = status.st_size
        with path.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            # the header may claim more bytes than the file has
            if len(first) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise CorruptData(
                    f"{path}: no safetensors file: its header is cut or has {length} bytes"
                )
            # readers differ in which of two equal names they take
            body = json.loads(file.read(length), object_pairs_hook=once)
    except OSError as error:
        raise not_read(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: its header cannot be read: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise CorruptData(f"{path}: its header is no JSON object")
    body.pop("__metadata__", None)
    return _tensors(path, body, LENGTH_BYTES + length, size)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose names are there once each.

    Raises:
        ValueError: one is there twice.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name is there twice")
    return out


def _tensors(path: Path, body: Mapping[str, Any], data_at: int, size: int) -> dict[str, Tensor]:
    found: list[tuple[int, int, Tensor]] = []
    for name, entry in body.items():
        try:
            dtype = entry["dtype"]
            shape = entry["shape"]
            start, stop = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise CorruptData(f"{path}: {name[:200]} lacks dtype, shape or data_offsets") from None
        # `type`, as true is an instance of int
        numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
        if (
            not all(type(n) is int and 0 <= n <= size for n in numbers)
            or len(numbers) > MAX_DIMENSIONS + 2
        ):
            raise CorruptData(f"{path}: {name[:200]} has a shape or offsets that cannot be")
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise CorruptData(f"{path}: {name[:200]} has numbers of kind {str(dtype)[:40]!r}")
        if prod(shape) * BYTES[dtype] != stop - start:
            raise CorruptData(
                f"{path}: {name[:200]} of shape {shape} does not have {stop - start} bytes"
            )
        found.append((start, stop, Tensor(name, dtype, tuple(shape), path, data_at + start)))
    # empty tensors share an offset with their successor
    found.sort(key=lambda item: item[:2])
    at = 0
    for start, stop, tensor in found:
        # an overlap would make two names for the same bytes, a gap would hide some
        if start != at:
            raise CorruptData(
                f"{path}: the bytes of {tensor.name[:200]} do not follow those before it"
            )
        at = stop
    if data_at + at != size:
        raise CorruptData(f"{path} has {size} bytes, and its header says {data_at + at}")
    return {tensor.name: tensor for _, _, tensor in found}


class Writer:
    """A new safetensors file whose tensors are written one after the other, in the order in which
    they are named. Its header follows at the end, into room that is left for it: shapes and hashes
    need not be known before.
    """

    def __init__(self, path: Path, names: Iterable[str], metadata_bytes: int = 256) -> None:
        """Reserve room for metadata of at most `metadata_bytes`, as JSON."""
        self.path = path
        self._names = deque(names)
        self._entries: dict[str, Any] = {}
        entries = sum(len(strict_json.dumps(name)) + MAX_ENTRY_BYTES for name in self._names)
        # shapes and offsets are at most as long as MAX_ENTRY_BYTES, so that the room suffices
        self._data_at = (
            LENGTH_BYTES + -(-(metadata_bytes + entries + MAX_ENTRY_BYTES) // ALIGNMENT) * ALIGNMENT
        )
        self._at = 0
        self._file = NewFile(path, self._data_at)

    def write(self, name: str, dtype: str, shape: Sequence[int], data: memoryview) -> None:
        """Write the bytes of the next tensor.

        Raises:
            ValueError: another one is next, or it has another size.
        """
        if not self._names or name != self._names[0] or len(data) != prod(shape) * BYTES[dtype]:
            raise ValueError(f"{name} of {len(data)} bytes is not what follows in {self.path}")
        self._names.popleft()
        start = self._at
        self._at = self._at + len(data)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [start, self._at],
        }
        self._file.write(data)

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header, and put the file on disk.

        Raises:
            ValueError: a tensor was not written, or the header is larger than its room.
            OSError: some of it could not be put on disk.
        """
        if self._names:
            raise ValueError(f"{self.path}: {self._names[0]} was not written")
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
