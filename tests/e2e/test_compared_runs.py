"""`compare` on runs that were trained: one rank, other layouts, a restart, and a flipped bit."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from mtrain.cli.main import main
from tests.support.commands import SMALL
from tests.support.launched import Launched
from tests.support.page_numbers import shown_in
from tests.support.run_folders import reported

pytestmark = [pytest.mark.e2e, pytest.mark.full]

STEPS = 6
RUNS = {
    # name -> words, and the step of the fault; 0: there is none
    "one": (["parallel=single"], 0),
    "tp2": (["parallel=tp2sp", "--restarts", "1", "--inject", "kill@4:1"], 0),
    "pp2": (["parallel=pp2"], 0),
    "dp2": (["parallel=dp2"], 0),
    "tp2pp2": (["parallel=tp2pp2"], 0),
    "small": (["parallel=single", "trainer.micro_batch_size=1"], 0),
    # These three are added to the residual stream. One within an MLP may change next to nothing.
    "wrong at 3": (["parallel=tp2sp", "--inject", "flip_activation@3:1"], 3),
    "wrong at 4": (["parallel=pp2", "--inject", "flip_activation@4:0"], 4),
    "wrong at 5": (["parallel=single", "--inject", "flip_activation@5:0"], 5),
}


def test_compared_runs_in_all_pairs_of_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = {}
    for place, (name, (words, _)) in enumerate(RUNS.items()):
        own = [f"trainer.train_iters={STEPS}", "checkpoint.save_interval=2", f"log.name=run{place}"]
        run = Launched(*SMALL, *own, *words, cwd=tmp_path)
        assert run.wait() == 0, run.said
        homes[name] = str(tmp_path / f"runs/run{place}")
    capsys.readouterr()
    pairs = list(combinations(RUNS, 2))
    assert len(pairs) == 36
    for one, other in pairs:
        faults = [RUNS[name][1] for name in (one, other) if RUNS[name][1]]
        first = min(faults, default=0)
        assert main(["compare", homes[one], homes[other], "--json"]) == (first > 0), (one, other)
        found = json.loads(capsys.readouterr().out)
        assert found["steps"] == STEPS
        assert found["expected_equal"]
        assert found["equal"] == (first == 0)
        if first:
            assert found["first"]["first"] == first, (one, other)
    runs = [Path(home) for home in homes.values()]
    page, _ = reported(*runs)
    shown = shown_in(page, *runs)
    assert [(one.where, one.text) for one in shown if not one.holds(one.text)] == []
    assert not any(one.holds(wrong) for one in shown for wrong in one.wrong())
