"""The example of a sink: a package of its own, over a run that is killed and restarted."""

from __future__ import annotations

from pathlib import Path

from tests.examples.test_hook import installed
from tests.support.commands import ROOT, SMALL, metrics
from tests.support.launched import Launched

RUN = (
    *SMALL,
    "parallel=tp2",
    "trainer.train_iters=4",
    "checkpoint.save_interval=2",
    "optim.warmup_iters=1",
    "log.name=run",
    "log.sinks=[csv]",
)


def test_sink_has_each_step_once_after_a_kill(tmp_path: Path) -> None:
    patch = installed(tmp_path, ROOT / "examples/sink")
    words = (*RUN, "--restarts", "1", "--inject", "kill@4:0")
    run = Launched(*words, cwd=tmp_path, patch=patch)
    assert run.wait() == 0, run.said
    assert "restart 1 of 1" in run.said
    home = tmp_path / "runs/run"
    losses = [f"{line['step']},{line['loss']}" for line in metrics(home) if "loss" in line]
    rows = (home / "loss.csv").read_text().splitlines()
    assert rows[0] == "step,loss,lr"
    assert [row.rpartition(",")[0] for row in rows[1:]] == losses
    assert len(losses) == 4


def test_sink_unknown_name_is_refused(tmp_path: Path) -> None:
    run = Launched(*RUN, "log.sinks=[csv,csv]", cwd=tmp_path, patch=installed(tmp_path))
    assert run.wait() == 2
    assert "MT520" in run.said
    assert "no sink is called csv" in run.said
