"""Files that are written from a ring of memory: the same bytes as those that are written from
anywhere, with a ring far smaller than a file.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest

from mtrain.ckpt.new_file import PAGE, Ring, Writer, data_offset
from tests.support.patience import patient

RING_BYTES = 4 * PAGE
NAMES = [f"{number}-{'x' * 90}" for number in range(30)]
"""Their header is longer than a page."""


class Copier:
    """The memory, and the rank that copies bytes to it as the writer frees it."""

    def __init__(self, first_page: int) -> None:
        self.memory = memoryview(mmap(-1, RING_BYTES))
        start = first_page * PAGE + data_offset(NAMES, 256) % PAGE
        self.at = start
        self.freed = start
        self.source = Ring(self.memory, start, self.free)

    def free(self, position: int) -> None:
        assert self.freed <= position <= self.at
        # Bytes that are still needed would show in the file.
        for byte in range(self.freed, position):
            self.memory[byte % RING_BYTES] = 0xFF
        self.freed = position

    def copy(self, data: bytes, add: Callable[[memoryview], None]) -> None:
        """Copy bytes, and add each part to the file."""
        while data:
            begin = self.at % RING_BYTES
            part = data[: min(PAGE, RING_BYTES - begin)]
            deadline = time.monotonic() + patient(10)
            while self.at + len(part) - self.freed > RING_BYTES:
                assert time.monotonic() < deadline, "the writer frees nothing"
                time.sleep(0.0005)
            self.memory[begin : begin + len(part)] = part
            self.at += len(part)
            add(self.memory[begin : begin + len(part)])
            data = data[len(part) :]


@pytest.mark.parametrize("first_page", [0, 3])
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 50_001])
def test_checkpoint_file_from_ring_equals_plain_one(
    size: int, first_page: int, tmp_path: Path
) -> None:
    data = os.urandom(size)
    pieces = [data[size * number // 29 :] for number in range(len(NAMES))]
    copier = Copier(first_page)
    with (
        Writer(tmp_path / "plain", NAMES) as plain,
        Writer(tmp_path / "ring", NAMES, source=copier.source) as ringed,
    ):
        for name, piece in zip(NAMES, pieces, strict=True):
            plain.write(name, "U8", (len(piece),), memoryview(piece))
            ringed.begin(name, "U8", (len(piece),))
            copier.copy(piece, ringed.add)
        plain.close({})
        ringed.close({})
    assert (tmp_path / "ring").read_bytes() == (tmp_path / "plain").read_bytes()
    assert copier.freed == copier.at


def test_checkpoint_file_from_ring_reports_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    copier = Copier(0)
    with Writer(tmp_path / "x", NAMES[:1], source=copier.source) as writer:
        writer.begin(NAMES[0], "U8", (RING_BYTES,))
        with pytest.raises(OSError, match="No space left"):
            copier.copy(bytes(RING_BYTES), writer.add)
