"""The view of a run, next to the hooks of the run itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.config.schema.resilience import ResilienceConfig
from mtrain.views.terminal import plain
from mtrain.views.watched import Watched
from tests.support.forked import import_engine
from tests.support.runs import tiny_run


def write(home: Path, *events: dict[str, Any]) -> None:
    """Write the only attempt of a run folder."""
    (home / "events").mkdir()
    (home / "events/0001.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))


def test_progress_views_straggler_is_named_once(tmp_path: Path) -> None:
    """Read the event of the hook itself."""
    import_engine()
    from mtrain.train.hooks.stragglers import Stragglers

    grid = SimpleNamespace(coords=lambda rank: {"pp": 0})
    context: Any = SimpleNamespace(world=SimpleNamespace(grid=grid))
    noted: list[dict[str, Any]] = []

    def note(kind: str, step: int, **facts: Any) -> None:
        noted.append({"format": 1, "kind": kind, "time": "", "step": step, **facts})

    metrics: Any = SimpleNamespace(note=note)
    hook = Stragglers(ResilienceConfig(straggler_interval=10, straggler_reports=1), metrics)
    reports = [{"step": 40, "own_s": t, "machine": "n7", "device": "cuda:1"} for t in (1, 1, 1, 3)]
    hook._compare(context, reports)
    write(tmp_path, *noted, *noted)
    run = Watched(tmp_path)
    run.look()
    frame = plain([run], 80, "ascii")
    assert "slow    rank 3 on n7: 3.0 x the others  at step 40" in frame
    assert frame.count("rank 3") == 1
    assert "alert" not in frame


def test_progress_live_draws_only_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import_engine()
    from mtrain.train.hooks import progress

    (tmp_path / "run.yaml").write_text("trainer: {train_iters: 40}")
    values = {"loss": 1.5, "lr": 0.1}
    write(tmp_path, {"format": 1, "kind": "step", "time": "", "step": 2, "values": values})
    run = tiny_run()
    run = run.model_copy(update={"log": run.log.model_copy(update={"progress": "live"})})
    assert progress.Progress(run, speaks=True, folder=tmp_path).choice == "plain"
    monkeypatch.setattr(progress, "redraws", lambda: True)
    hook = progress.Progress(run, speaks=True, folder=tmp_path)
    context: Any = SimpleNamespace(state=SimpleNamespace(step=0))
    hook.start(context)
    assert hook.view is not None
    hook.note("a note [bold] above")
    thread = hook.view._thread
    hook.close()
    assert not thread.is_alive()
    out = capsys.readouterr().out
    assert "a note [bold] above" in out
    assert "2/40" in out
