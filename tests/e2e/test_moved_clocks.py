"""A run whose wall clock jumps by an hour, forth and back, again and again."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.commands import SMALL, metrics
from tests.support.launched import Launched
from tests.support.patience import slowness

pytestmark = pytest.mark.e2e

HOUR_S = 3600.0
STEPS = 12


def jumping() -> None:
    """Have the wall clock of all processes jump four times a second."""
    real = time.time

    def moved() -> float:
        return real() + HOUR_S * (int(4 * time.monotonic()) % 3 - 1)

    time.time = moved


@pytest.mark.full
def test_moved_clock_changes_no_limit_estimate_or_account(tmp_path: Path) -> None:
    limit_s = 1.5 * slowness()
    words = [*SMALL, f"trainer.train_iters={STEPS}", "parallel=tp2", "log.name=run"]
    words += ["checkpoint.async_save=true", "checkpoint.save_interval=4"]
    words += [f"trainer.soft_timeout_s={limit_s}", f"trainer.timeout_s={2 * limit_s}"]
    began = time.monotonic()
    run = Launched(*words, "--restarts", "1", "--inject", "kill@6:1", cwd=tmp_path, patch=jumping)
    assert run.wait() == 0, run.said
    lived_s = time.monotonic() - began
    assert "no progress" not in run.said
    left = re.findall(r"([\d.]+)s left", run.said)
    assert len(left) >= STEPS
    assert all(float(seconds) < 60 for seconds in left), run.said
    assert not re.search(r"\dm\d+s left|h\d+m left", run.said), run.said
    home = tmp_path / "runs/run"
    assert [line["step"] for line in metrics(home)] == [*range(1, STEPS + 1)]
    life = json.loads((home / "goodput.json").read_text())
    assert sum(life["seconds"].values()) == pytest.approx(life["wall_s"], abs=0.01)
    assert 0 < life["wall_s"] <= lived_s
