"""`compare` on runs that were trained: one rank, other layouts, a restart, and a flipped bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.cli.main import main
from tests.support.commands import SMALL
from tests.support.launched import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.full]

STEPS = 12
WRONG = 7
RUNS = {
    "one": ["parallel=single"],
    "tp2": ["parallel=tp2sp", "--restarts", "1", "--inject", "kill@6:1"],
    "pp2": ["parallel=pp2"],
    "wrong": ["parallel=pp2", "--inject", f"flip_activation@{WRONG}:0"],
}


def test_compared_runs_in_other_layouts_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in RUNS.items():
        own = [f"trainer.train_iters={STEPS}", "checkpoint.save_interval=4", f"log.name={name}"]
        run = Launched(*SMALL, *own, *words, cwd=tmp_path)
        assert run.wait() == 0, run.said
    home = tmp_path / "runs"
    capsys.readouterr()
    for other, code in {"one": 0, "tp2": 0, "pp2": 0, "wrong": 1}.items():
        assert main(["compare", str(home / "one"), str(home / other), "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert found["steps"] == STEPS
        assert found["expected_equal"]
        assert found["equal"] == (code == 0)
    assert found["first"]["first"] == WRONG
