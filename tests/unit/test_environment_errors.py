"""Errors of the place where a command runs end with 3 and a sentence, whatever raised them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.cli import main as command
from mtrain.data.preprocess import workers
from mtrain.errors import OF_THE_PLACE


def raising(error: BaseException) -> Callable[[object], int]:
    def run(arguments: object) -> int:
        raise error

    return run


@pytest.mark.parametrize("number", [*OF_THE_PLACE], ids=errno.errorcode.get)
def test_environment_errors_include_refusals_of_the_system(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number), "/somewhere/file")
    monkeypatch.setattr(command, "run", raising(error))
    assert command.main(["check"]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"/somewhere/file: {os.strerror(number)}\n  fix: ")
    assert "unexpected" not in said


def test_environment_errors_exclude_other_system_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", raising(OSError(errno.EBADF, "Bad file descriptor")))
    assert command.main(["check"]) == 1
    assert "unexpected OSError" in capsys.readouterr().err


def test_environment_errors_include_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", raising(MemoryError()))
    assert command.main(["check"]) == 3
    assert "memory" in capsys.readouterr().err


def test_environment_errors_include_missing_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert command.main(["check"]) == 3
    assert capsys.readouterr().err.startswith("the working folder was removed\n  fix: ")
    assert command.main(["choices", "cluster"]) == 0, "a verb that needs no folder works without"


def test_environment_errors_include_tokenizing_workers() -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/file")

    failed = workers._caught(full, ())
    assert failed.kind == "BadEnvironment"
    assert failed.lines[0] == "/somewhere/file: No space left on device"
