"""Every number on the page of a trained run is found in its folder, and a wrong one is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtrain.data.store.indexed import IndexedWriter
from tests.support.commands import SMALL
from tests.support.launched import Launched
from tests.support.page_numbers import shown_in
from tests.support.run_folders import reported

pytestmark = [pytest.mark.e2e, pytest.mark.full]

SAMPLED = ("log.statistics.interval=4", "log.memory_interval=2")
RUNS = {
    # name -> words, and parts of the page that only this run shows
    "stages": (
        [
            "data=blend",
            "data.blend=[one,two]",
            "data.blend_weights=[0.25,0.75]",
            "data.split=[0.9,0.1,0]",
            "trainer.eval_interval=8",
            "trainer.eval_iters=1",
            "parallel=pp2",
            "checkpoint.save_interval=8",
            "trainer.train_iters=24",
            "trainer.profile_step=10",
            "trainer.profile_ranks=[0,1]",
            "--restarts",
            "1",
            "--inject",
            "kill@14:1",
        ],
        ("Pipeline schedule", "steps that were made again", "rank 1 was ended by SIGKILL"),
    ),
    "experts": (
        [
            "model=mixtral_tiny",
            "parallel=ep2",
            "trainer.train_iters=12",
            "resilience.straggler_interval=2",
            "resilience.straggler_reports=1",
            "--inject",
            "slow@3:1",
        ],
        ("experts: max_over_mean", "The slowest rank was 1 on"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_report_numbers_of_a_trained_run_are_in_its_folder(name: str, tmp_path: Path) -> None:
    words, parts = RUNS[name]
    draw = np.random.default_rng(1)
    for corpus in ("one", "two"):
        with IndexedWriter(tmp_path / corpus, np.dtype("<u2")) as writer:
            writer.add(draw.integers(0, 500, 40_000).astype(np.uint16), np.full(2000, 20))
    run = Launched(*SMALL, *SAMPLED, f"log.name={name}", *words, cwd=tmp_path)
    assert run.wait() == 0, run.said
    home = tmp_path / "runs" / name
    page, _ = reported(home)
    assert [part for part in parts if part not in page] == []
    shown = shown_in(page, home)
    assert [(one.where, one.text) for one in shown if not one.holds(one.text)] == []
    seeded = [(one, wrong) for one in shown for wrong in one.wrong()]
    assert len(seeded) > 300
    assert [(one.where, wrong) for one, wrong in seeded if one.holds(wrong)] == []
