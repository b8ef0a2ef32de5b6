"""Feeds of sinks: each step once and in order, whatever the sink or the process does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtrain.errors import BadEnvironment
from mtrain.events import feed, log
from mtrain.events.feed import Feed
from mtrain.events.log import Journal, Writer
from mtrain.events.read import Event
from mtrain.events.sink import Session, Sink, usual
from mtrain.train import sinks
from tests.support.runs import tiny_run

RUN = tiny_run()
TENSORS = ("weights", "updates")


class Kept(Sink):
    """A sink that keeps steps, and fails `failures` times."""

    steps: list[int]
    described: list[tuple[int, str]]
    further: list[tuple[int, str]]
    ids: list[str]
    failures = 0
    known: int | None = None
    wait: threading.Event | None = None

    def open(self) -> int | None:
        self.ids.append(self.session.id)
        return self.known

    def send(self, events: Sequence[Event]) -> None:
        if self.wait is not None:
            self.wait.wait(20)
        if type(self).failures:
            type(self).failures -= 1
            raise ConnectionError("refused")
        self.steps.extend(event["step"] for event in events if event["kind"] == log.STEP)
        found = [event for event in events if event["kind"] == log.STATISTICS]
        self.described.extend((event["step"], event["of"]) for event in found)
        kinds = (log.MEMORY, log.ALERT)
        self.further.extend((e["step"], e["kind"]) for e in events if e["kind"] in kinds)


class Purging(Kept):
    """A sink that takes back steps which are made again."""

    purges = True

    def open(self) -> int | None:
        self.steps[:] = [step for step in self.steps if step <= self.session.step]
        self.described[:] = [pair for pair in self.described if pair[0] <= self.session.step]
        self.further[:] = [pair for pair in self.further if pair[0] <= self.session.step]
        return super().open()


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test sinks of its own, and threads that look often."""
    monkeypatch.setattr(feed, "PAUSE_S", 0.01)
    for kind in (Kept, Purging):
        monkeypatch.setattr(kind, "steps", [], raising=False)
        monkeypatch.setattr(kind, "described", [], raising=False)
        monkeypatch.setattr(kind, "further", [], raising=False)
        monkeypatch.setattr(kind, "ids", [], raising=False)
        monkeypatch.setattr(kind, "failures", 0)
    monkeypatch.setattr(Kept, "wait", None)
    monkeypatch.setattr(Kept, "known", None)


def attempt(
    home: Path, begun: int, last: int, *kinds: type[Sink], sent: bool = True, close_s: float = 5.0
) -> None:
    """Run an attempt from step `begun` to `last`; unless `sent`, it is killed before anything is
    sent.
    """
    writer = Writer([Journal(log.next_attempt(home), lambda event: event)])
    writer.put(log.START, begun)
    writer.settle(5)
    feeds = [Feed(kind.__name__, kind, RUN, home, begun) for kind in kinds] if sent else []
    for step in range(begun + 1, last + 1):
        writer.put(log.STEP, step, values={"loss": float(step)})
        for kind in TENSORS if step % 2 == 0 else ():
            writer.put(log.STATISTICS, step, of=kind, columns=["norm"], rows={"a.b": [1.0]})
        if step % 3 == 0:
            writer.put(log.ALERT, step, name="loss", text="high")
            writer.put(log.MEMORY, step, by_rank={"allocated_bytes": [1]})
    writer.close()
    feed.close(feeds, close_s)


def test_sinks_get_each_step_once_over_restarts(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 4, Kept, Purging)
    attempt(tmp_path, 2, 6, Kept, Purging, sent=False)
    attempt(tmp_path, 5, 9, Kept, Purging)
    assert Kept.steps == Purging.steps == list(range(1, 10))
    assert Kept.described == Purging.described == [(s, k) for s in (2, 4, 6, 8) for k in TENSORS]
    expected = [(step, kind) for step in (3, 6, 9) for kind in (log.ALERT, log.MEMORY)]
    assert Kept.further == Purging.further == expected
    assert len({*Kept.ids, *Purging.ids}) == 1


def test_sinks_steps_known_to_the_place_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # killed after steps 1 to 3 were sent, and before that was noted
    monkeypatch.setattr(Kept, "known", 3)
    attempt(tmp_path, 0, 5, Kept)
    assert Kept.steps == [4, 5]


def test_sinks_steps_lost_by_the_place_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path, 0, 4, Kept)
    # killed while a library still held steps 3 and 4
    del Kept.steps[2:], Kept.described[2:]
    monkeypatch.setattr(Kept, "known", 2)
    attempt(tmp_path, 4, 6, Kept)
    assert Kept.steps == [1, 2, 3, 4, 5, 6]
    assert Kept.described == [(s, k) for s in (2, 4, 6) for k in TENSORS]


def test_sinks_failing_one_warns_once_and_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Kept, "failures", 3)
    writer = Writer([Journal(log.next_attempt(tmp_path), lambda event: event)])
    one = Feed("kept", Kept, RUN, tmp_path, 0)
    for step in range(1, 6):
        writer.put(log.STEP, step, values={"loss": 1.0})
    until = time.monotonic() + 20
    while Kept.steps != [1, 2, 3, 4, 5] and time.monotonic() < until:
        time.sleep(0.01)
    feed.close([one])
    writer.close()
    assert Kept.steps == [1, 2, 3, 4, 5]
    assert capsys.readouterr().err.count("warning") == 1


def test_sinks_hanging_one_is_left_behind_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freed = threading.Event()
    monkeypatch.setattr(Kept, "wait", freed)
    begun = time.monotonic()
    attempt(tmp_path, 0, 3, Kept, close_s=0.2)
    assert time.monotonic() - begun < 5
    assert "log.sinks=[Kept]: cannot send what follows step 0" in capsys.readouterr().err
    hung = [thread for thread in threading.enumerate() if thread.name == "sink Kept"]
    # It may try once more before it ends.
    monkeypatch.setattr(Kept, "failures", 9)
    freed.set()
    for thread in hung:
        thread.join()
    assert Kept.steps == []
    monkeypatch.setattr(Kept, "failures", 0)
    attempt(tmp_path, 3, 4, Kept)
    assert Kept.steps == [1, 2, 3, 4]


def test_sinks_usual_names_leave_out_what_is_no_number() -> None:
    values = {"loss": 2.0, "grad_norm": None, "skipped": True, "other": 3}
    event = {"kind": "step", "step": 1, "values": values}
    assert usual(event) == {"lm loss": 2.0, "skipped": 1.0, "other": 3.0}
    assert usual({"kind": "warning", "step": 1, "text": "x"}) == {}


def test_sinks_unknown_plug_in_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint("odd", "json:JSONDecoder", "mtrain.sinks")
    monkeypatch.setattr(sinks.installed, "found", lambda _: {"odd": entry})
    with pytest.raises(BadEnvironment, match="is no subclass of"):
        sinks.sink_class("odd")


def test_sinks_no_library_is_imported_unless_opened() -> None:
    code = (
        "import json, sys; from mtrain.config.machine import installed;"
        "from mtrain.train.sinks import sink_class;"
        "[sink_class(name) for name in installed.shipped(installed.SHIPPED_SINKS)];"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "mtrain" in loaded
    named = {"tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry", "torch"}
    assert not loaded & (named | {"swanlab", "trackio"})


def test_sinks_session_name_is_that_of_the_folder(tmp_path: Path) -> None:
    first = feed.id_of(tmp_path) if (tmp_path / "events").mkdir() is None else ""
    assert (len(first), feed.id_of(tmp_path)) == (21, first)
    assert Session(RUN, tmp_path, first, 0).name == tmp_path.name


def test_sinks_statistics_have_a_number_for_each_row_and_column() -> None:
    rows = {"decoder.layers.0.mlp": [2.0, None]}
    event = {"kind": log.STATISTICS, "step": 1, "of": "gradients", "rows": rows}
    event |= {"columns": ["norm", "max"]}
    assert usual(event) == {"gradients/norm/decoder.layers.0.mlp": 2.0}
