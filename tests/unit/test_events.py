"""The event stream: its thread, disks that refuse or hang, attempts, and reading it back."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.events import log, read
from mtrain.events.log import Journal, Writer

Fail = Callable[[Callable[[int, bytes], int]], None]


def writer_in(home: Path, close_s: float = 5.0) -> Writer:
    """Return the writer of a new attempt."""
    stream = log.next_attempt(home)
    journals = [Journal(stream, lambda event: event)]
    journals.append(Journal(home / "metrics.jsonl", log.metrics_line))
    return Writer(journals, close_s)


def attempt(home: Path, begun: int, *steps: int) -> None:
    """Write an attempt that begins after a step, and makes others."""
    writer = writer_in(home)
    writer.put(log.START, begun)
    for step in steps:
        writer.put(log.STEP, step, values={"loss": float(begun)})
    writer.close()


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a function that puts a writing function in the place of the system's."""
    monkeypatch.setattr(log, "RETRY_S", 0.01)
    return lambda write: monkeypatch.setattr(os, "write", write)


def test_events_metrics_lines_are_those_of_the_stream(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.put(log.START, 0)
    writer.put(log.STEP, 1, values={"loss": 2.0, "grad_norm": float("nan")})
    writer.put(log.CHECKPOINT, 1, name="step_00000001")
    writer.put(log.EVALUATION, 1, values={"valid_loss": 3.0}, seconds=0.5)
    writer.close()
    found = list(read.events(tmp_path))
    assert [event["kind"] for event in found] == ["start", "step", "checkpoint", "evaluation"]
    step, evaluation = lines(tmp_path / "metrics.jsonl")
    assert step == {"time": found[1]["time"], "step": 1, "loss": 2.0, "grad_norm": None}
    assert evaluation == {"time": found[3]["time"], "step": 1, "valid_loss": 3.0}


def test_events_full_disk_loses_nothing_once_freed(
    tmp_path: Path, disk: Fail, capsys: pytest.CaptureFixture[str]
) -> None:
    full = threading.Event()
    full.set()
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if full.is_set():
            # a part of a line fits before the disk is full
            if len(data) > 10:
                return real(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    disk(write)
    writer = writer_in(tmp_path)
    begun = time.monotonic()
    for step in range(1, 101):
        writer.put(log.STEP, step, values={"loss": 1.0})
        writer.settle(0.02)
    assert time.monotonic() - begun < 0.5
    full.clear()
    writer.close()
    assert [event["step"] for event in read.events(tmp_path)] == list(range(1, 101))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 101))
    said = capsys.readouterr().err
    assert said.count("warning") == 1
    assert "cannot be written (No space left on device); training goes on" in said


def test_events_hung_disk_drops_and_counts(
    tmp_path: Path,
    disk: Fail,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(log, "MOST_HELD", 10)
    freed = threading.Event()
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        freed.wait(10)
        return real(descriptor, data)

    disk(write)
    writer = writer_in(tmp_path)
    writer.put(log.STEP, 1, values={"loss": 1.0})
    writer.settle(0.02)
    begun = time.monotonic()
    for step in range(2, 32):
        writer.put(log.STEP, step, values={"loss": 1.0})
        writer.settle(5.0)
    assert time.monotonic() - begun < 0.5
    freed.set()
    writer.close()
    found = list(read.events(tmp_path))
    assert [event["step"] for event in found if event["kind"] == "step"] == list(range(1, 12))
    assert found[-1]["kind"] == "dropped"
    assert found[-1]["count"] == 20
    assert "0001.jsonl: 20 lines were not written" in capsys.readouterr().err


def test_events_steps_made_again_are_those_of_last_attempt(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 1, 2, 3, 4)
    with (tmp_path / "events/0001.jsonl").open("a") as file:
        file.write('{"format": 1, "kind": "step", "st')
    attempt(tmp_path, 2, 3)
    (tmp_path / "events/0003.jsonl").write_text('{"format": 99, "kind": "step", "step": 7}\n[]\n')
    attempt(tmp_path, 3, 4, 5)
    steps = [e for e in read.events(tmp_path) if e["kind"] == "step"]
    assert [(e["step"], e["values"]["loss"]) for e in steps] == [
        (1, 0.0),
        (2, 0.0),
        (3, 2.0),
        (4, 3.0),
        (5, 3.0),
    ]


def test_events_reader_goes_on_at_its_place(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 1, 2)
    place = read.Place()
    assert len(read.following(tmp_path, place, 2)) == 2
    assert [e["step"] for e in read.following(tmp_path, place, 2)] == [2]
    assert read.following(tmp_path, place, 2) == []
    with (tmp_path / "events/0001.jsonl").open("a") as file:
        file.write('{"format": 1, "kind": "step"')
        file.flush()
        assert read.following(tmp_path, place, 2) == []
        file.write(', "step": 3}\n')
    assert [e["step"] for e in read.following(tmp_path, place, 2)] == [3]
