"""Conversions that fail: a full disk, another process, an error in a thread.

Nothing stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from mtrain.ckpt import new_file
from mtrain.ckpt.new_file import Writer
from mtrain.cli.atomic_output import drafted
from mtrain.convert import prefetch
from mtrain.convert.safetensors_file import read_header
from mtrain.errors import BadEnvironment

FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: object) -> None:
    raise FULL


def test_convert_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def convert() -> None:
        with drafted(tmp_path / "out", "importing") as draft:
            (draft / "weights").write_bytes(b"abc")
            raise FULL

    with pytest.raises(
        BadEnvironment, match=r"out cannot be written \(.* free\): .*No space left"
    ) as caught:
        convert()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_convert_two_never_share_a_folder(tmp_path: Path) -> None:
    with drafted(tmp_path / "out", "importing") as draft:
        (draft / "weights").write_bytes(b"abc")
        with (
            pytest.raises(BadEnvironment, match="another process writes"),
            drafted(tmp_path / "out", "importing"),
        ):
            pass
        assert (draft / "weights").read_bytes() == b"abc"
    assert (tmp_path / "out/weights").read_bytes() == b"abc"
    with drafted(tmp_path / "other", "importing") as draft:
        assert list(draft.iterdir()) == []


def test_convert_killed_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".importing-out/deep").mkdir(parents=True)
    (tmp_path / ".importing-out/deep/weights").write_bytes(b"abc")
    with drafted(tmp_path / "out", "importing"):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["out"]


@pytest.mark.parametrize("size", [3, 4096, 3 * 4096 + 5])
def test_convert_disk_error_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(new_file, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(os, "pwrite", fail)

    def write() -> None:
        with Writer(tmp_path / "x.safetensors", ["x"]) as writer:
            writer.write("x", "U8", (size,), memoryview(bytes(size)))
            writer.close({})

    with pytest.raises(OSError, match="No space left"):
        write()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50_001])
def test_convert_file_is_whole_for_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refused: bool
) -> None:
    """Write past the page cache; with `refused` the file system opens files so, but then does not
    write them.
    """
    monkeypatch.setattr(new_file, "BLOCK_BYTES", 4096)
    pwrite = os.pwrite
    data = os.urandom(size)

    def only_through_cache(file: int, block: memoryview, at: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, block[:1000], at)

    if refused:
        monkeypatch.setattr(os, "pwrite", only_through_cache)
    names = [f"{number}-{'x' * 90}" for number in range(30)]  # their header is longer than a block
    with Writer(tmp_path / "x.safetensors", names) as writer:
        for number, name in enumerate(names):
            writer.write(
                name, "U8", (size - size * number // 29,), memoryview(data)[size * number // 29 :]
            )
        writer.close({})
    found = read_header(tmp_path / "x.safetensors")
    buffer = bytearray(size)
    for number, name in enumerate(names):
        start = size * number // 29
        found[name].read_into(memoryview(buffer)[start:])
        assert buffer[start:] == data[start:]


def test_convert_error_starts_no_waiting_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "cpu_cores", lambda: 1)
    gate = threading.Event()
    begun = list[int]()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise FULL
        gate.wait(10)

    threading.Timer(0.1, gate.set).start()
    with pytest.raises(OSError, match="No space left"):
        list(prefetch.prefetched(work, range(10), lambda _: 1))
    assert len(begun) <= 2


def test_convert_results_are_ordered_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 100)
    monkeypatch.setattr(prefetch, "cpu_cores", lambda: 4)
    sizes = [10, 500, 40, 40, 40, 300, 20, 70, 5, 90]
    begun = list[int]()
    taken = list[int]()

    def work(number: int) -> int:
        begun.append(number)
        held = [sizes[n] for n in list(begun) if n not in taken]
        assert sum(held) - max(held) <= 100
        return -number

    for number, result in prefetch.prefetched(work, range(10), sizes.__getitem__):
        assert result == -number
        taken.append(number)
    assert taken == list(range(10))
