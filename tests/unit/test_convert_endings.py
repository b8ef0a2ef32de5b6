"""How a conversion ends that cannot go on: a full disk, another process, an error in a thread. Nothing stays."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from mtrain.cli.drafts import drafted
from mtrain.convert import tensor_file
from mtrain.convert.tensor_file import Writer, in_turn
from mtrain.errors import BadEnvironment

FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: object) -> None:
    raise FULL


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def convert() -> None:
        with drafted(tmp_path / "out", "importing") as draft:
            (draft / "weights").write_bytes(b"abc")
            raise FULL

    with pytest.raises(BadEnvironment, match=r"out cannot be written \(.* free\): .*No space left") as caught:
        convert()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_do_not_write_one_folder(tmp_path: Path) -> None:
    with drafted(tmp_path / "out", "importing") as draft:
        (draft / "weights").write_bytes(b"abc")
        with pytest.raises(BadEnvironment, match="another process writes"), drafted(tmp_path / "out", "importing"):
            pass
        assert (draft / "weights").read_bytes() == b"abc"
    assert (tmp_path / "out/weights").read_bytes() == b"abc"
    with drafted(tmp_path / "other", "importing") as draft:
        assert list(draft.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".importing-out/deep").mkdir(parents=True)
    (tmp_path / ".importing-out/deep/weights").write_bytes(b"abc")
    with drafted(tmp_path / "out", "importing"):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["out"]


def test_what_the_disk_refuses_while_a_file_grows_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", fail)
    with Writer(tmp_path / "x.safetensors", ["x"]) as writer:
        writer.write("x", "U8", (3,), memoryview(b"abc"))
        with pytest.raises(OSError, match="No space left"):
            writer.close({})


def test_after_an_error_nothing_that_waits_is_begun() -> None:
    gate, begun = threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        gate.wait(10)

    def interrupted() -> None:
        with in_turn(most=3) as call:
            for number in range(3):
                call(work, number)
            threading.Timer(0.1, gate.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert begun == [0]


def test_an_error_in_the_thread_is_raised_where_it_is_called() -> None:
    def failing() -> None:
        with in_turn() as call:
            for _ in range(5):
                call(fail)

    with pytest.raises(OSError, match="No space left"):
        failing()
