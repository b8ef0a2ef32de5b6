"""The terminal view of runs: read from their folders, and drawn at 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli import watch
from mtrain.cli.main import main
from mtrain.goodput.log import LOG
from mtrain.views import watched
from mtrain.views.terminal import ASCII, plain, sparkline
from mtrain.views.watched import Series, Watched

RUN = """
trainer: {train_iters: 100}
checkpoint: {save_interval: 30, save_minutes: null, save_final: true}
cluster: {device_memory_gib: 80.0}
"""
VALUES = {"grad_norm": 0.5, "lr": 1e-4, "tokens_per_s": 3200.0, "step_s": 2.0, "mfu": 0.4123}
VALUES |= {"data_wait_share": 0.01, "peak_bytes": 60 << 30, "planned_peak_bytes": 63 << 30}


def event(kind: str, step: int, **facts: Any) -> dict[str, Any]:
    """Return an event, two seconds a step."""
    minutes, seconds = divmod(2 * step, 60)
    at = f"2026-01-01T00:{minutes:02d}:{seconds:02d}.000Z"
    return {"format": 1, "kind": kind, "time": at, "step": step, **facts}


def made(step: int, loss: float | None) -> dict[str, Any]:
    """Return the event of a step."""
    return event("step", step, values={"loss": loss, **VALUES})


def write(home: Path, *events: dict[str, Any], attempt: int = 1, tail: str = "") -> None:
    """Append events to an attempt of a run folder, and a last line without its end."""
    (home / "events").mkdir(parents=True, exist_ok=True)
    with (home / f"events/{attempt:04d}.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in events) + tail)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder of a run that has made 40 of 100 steps."""
    folder = tmp_path / "eight_b"
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    life = {"format": 1, "kind": "sign", "attempt": "a", "begun": 1e9, "boot": "b", "clock": 5.0}
    life |= {"at": 1e9 + 100, "elapsed_s": 100.0, "open_s": 0.0, "open_cause": "stepping"}
    life |= {"seconds": {"stepping": 80.0, "saving": 20.0}, "first": 0, "step": 40, "steps": 40}
    (folder / LOG).write_text(json.dumps(life) + "\n")
    write(folder, event("start", 0), *(made(step, 8 - step / 10) for step in range(1, 41)))
    write(folder, event("checkpoint", 30, name="step_00000030"))
    write(folder, event("evaluation", 40, values={"valid_loss": 4.25}))
    return folder


def looked(home: Path, *, owned: bool = True) -> Watched:
    """Return a run folder after one look."""
    run = Watched(home, lambda home: owned)
    run.look()
    return run


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_views_frame_at_80_columns_has_every_fact(home: Path, encoding: str) -> None:
    write(home, event("warning", 40, text="the disk \x1b[31m is slow\u2026 " + "x" * 80))
    # The memory of all ranks, of which one gave none.
    write(home, event("memory", 40, by_rank={"peak_bytes": [70 << 30, None]}))
    frame = plain([looked(home)], 80, encoding)
    lines = frame.splitlines()
    assert max(map(len, lines)) <= 80
    assert frame.encode(encoding).isascii() == (encoding == "ascii")
    rows = {line[:8].strip(): line[8:] for line in lines}
    assert rows["step"].startswith("40/100  ETA 2m00s  40.0%  [")
    assert rows["loss"].startswith("4.0000  ")
    assert rows["loss"].endswith("valid 4.2500 at 40")
    assert rows["grad"] == "norm 0.500  lr 1.00e-04"
    assert rows["rate"] == "3.20k tokens/s  MFU 41.2%  2 s/step  data wait 1.0%"
    assert rows["memory"].startswith("peak 70.0 GiB of 80.0 GiB  planned 63.0 GiB  [")
    assert rows["save"] == "next at 60 in 40.0s  last at 30"
    assert rows["goodput"] == "80.0%  saving 20.0%"
    assert rows["alert"].startswith("step 40: the disk \\x1b[31m")
    assert rows["alert"].endswith("...")
    assert "\x1b" not in frame


def test_views_runs_stand_side_by_side(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.yaml").write_text(RUN)
    write(other, event("start", 0), made(1, None))
    runs = [looked(home), looked(other)]
    lines = plain(runs, 80, "ascii").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "eight_b", "other"]
    (loss,) = (line for line in lines if line.startswith("loss"))
    assert loss.index("4.0000") < loss.index("not finite")
    # At 60 columns two runs of this width have no room next to each other.
    assert plain(runs, 50, "ascii").count("\nrun ") == 1


def test_views_half_written_line_is_read_when_whole(home: Path) -> None:
    line = json.dumps(made(41, 1.0))
    write(home, tail=line[:30])
    run = looked(home)
    assert run.step == 40
    write(home, tail=line[30:] + "\n")
    run.look()
    assert (run.step, run.values["loss"]) == (41, 1.0)


def test_views_resumed_run_forgets_lost_steps(home: Path) -> None:
    run = looked(home)
    write(home, event("end", 40, how="failed", why="rank 1 died"))
    run.look()
    # The launcher still owns the folder: it may start the ranks again.
    assert (run.state, run.over) == ("failed", False)
    write(home, event("start", 30), made(31, 5.0), attempt=2)
    run.look()
    assert (run.state, run.step, len(run.losses.points)) == ("running", 31, 31)
    assert "attempt 2" in plain([run], 80, "ascii")
    assert "rank 1 died" in plain([run], 80, "ascii")


@pytest.mark.parametrize("files", ["none", "metrics", "format"])
def test_views_other_folders_are_shown(tmp_path: Path, files: str) -> None:
    """Show a run that never stepped, one without events, and one of another format."""
    (tmp_path / "run.yaml").write_text("trainer: {steps_in_old_days: 3}\nmodel: [")
    line = json.dumps({"step": 3, "loss": 2.5, "lr": 0.1})
    if files == "metrics":
        (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 4, "lo')
    if files == "format":
        write(tmp_path, {**made(3, 2.5), "format": 99})
        (tmp_path / "plan.json").write_text("[1, 2")
    run = looked(tmp_path, owned=False)
    frame = plain([run], 80, "utf-8")
    assert run.over
    assert run.state == "killed"
    assert ("2.5000" in frame) == (files == "metrics")
    assert "step    3\n" in frame if files == "metrics" else "step    0" in frame


def test_views_first_look_reads_the_last_part(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "RECENT_BYTES", 1000)
    run = looked(home)
    assert run.step == 40
    assert 0 < len(run.losses.points) < 10


def test_views_killed_run_is_over_once_silent(home: Path) -> None:
    run = looked(home, owned=False)
    # Another machine's locks may not be seen here, but it has given no sign of life for years.
    assert (run.state, run.over) == ("killed", True)
    assert run.life is not None
    run.life.attempts[-1].last = watched.time.time()
    assert (run.state, run.over) == ("running", False)


def test_views_profiled_steps_are_no_rate(home: Path) -> None:
    slow = made(41, 1.0)
    slow["values"] |= {"step_s": 900.0, "profiled": True}
    write(home, slow)
    assert looked(home).step_s == 2.0
    assert 900.0 not in looked(home).took


def test_views_series_stays_bounded() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, float(step))
    assert len(series.points) <= watched.POINTS
    assert series.points[-1][0] > 99_000
    values = [value for _, value in series.points]
    assert sparkline(values, 8, ASCII) == "_.-~=+*#"
    assert sparkline([1.0, None, 1.0], 8, ASCII) == "_!_"


def test_views_watch_once_prints_one_frame(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(home), "--once"]) == 0
    assert "40/100" in capsys.readouterr().out
    assert main(["watch", str(home / "none")]) == 2
    assert "MT502" in capsys.readouterr().err
    assert main(["watch"]) == 2
    assert "MT002" in capsys.readouterr().err


def test_views_watch_ends_with_the_run_or_at_ctrl_c(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "is_owned", lambda home: True)
    monkeypatch.setattr(
        watch.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main(["watch", str(home)]) == 0
    assert capsys.readouterr().out.startswith("eight_b running: step 40/100  loss 4.0000  norm 0.5")
    monkeypatch.setattr(watch, "redraws", lambda: True)
    assert main(["watch", str(home)]) == 0
    assert "40/100" in capsys.readouterr().out
    write(home, event("end", 40, how="finished"))
    monkeypatch.setattr(watch, "is_owned", lambda home: False)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: pytest.fail("the run is over"))
    assert main(["watch", str(home)]) == 0
    assert "finished" in capsys.readouterr().out
