"""Actions by wall-clock minutes: rank 0 decides by its clock, all ranks act together, no number
changes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.test_async_steps import assembled, of, stand_in
from tests.support.forked import run_ranks

Found = tuple[list[float], list[int], list[int]]
"""Losses, and the steps after which a rank saved and evaluated."""


def trained(folder: Path, ahead: bool, minutes: tuple[float | None, float | None]) -> list[Found]:
    """Return the actions of each of two ranks in 8 steps, each of which takes a minute by the clock
    of rank 0, and by no other.
    """
    run = of(ranks=2, trainer={"eval_iters": 1, "eval_interval": 0, "eval_minutes": minutes[1]})
    saving = {"save_interval": 0, "save_minutes": minutes[0], "keep": None, "save_final": False}
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=saving)})

    def job() -> Found:
        from mtrain.train.hooks.base import Hook
        from mtrain.train.hooks.checkpoints import Checkpoints
        from mtrain.train.hooks.evaluation import Evaluation
        from mtrain.train.hooks.metrics import Metrics
        from mtrain.train.loop import trainer
        from mtrain.train.loop.interruptions import ByTime

        losses: list[float] = []
        saved: list[int] = []
        evaluated: list[int] = []

        class Listens(Hook):
            def after_step(self, parts: Any, result: Any) -> None:
                losses.append(result.loss)

        class Saves(Checkpoints):
            def _save(self, parts: Any) -> None:
                saved.append(parts.state.step)
                super()._save(parts)

        class Evaluates(Evaluation):
            def _evaluate(self, parts: Any) -> None:
                evaluated.append(parts.state.step)
                super()._evaluate(parts)

        quiet: Any = SimpleNamespace(note=lambda text: None)
        with assembled(run, stand_in(Counter()) if ahead else None) as parts:
            first = parts.world.is_rank0
            parts.by_time = ByTime(
                run, lambda: 60.0 * parts.state.step if first else 1e9 * parts.state.step
            )
            metrics = Metrics(folder)
            chain = [Listens(), Saves(folder / "checkpoints", quiet, {}), Evaluates(metrics, quiet)]
            trainer.Trainer(parts, chain).fit()
        return losses, saved, evaluated

    found: list[Found] = run_ranks(2, job)
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("ahead", "saved", "evaluated"),
    [(False, [3, 6], [2, 4, 6, 8]), (True, [4, 8], [3, 6, 8])],
    ids=["told", "ahead"],
)
def test_by_time_ranks_save_and_evaluate_at_equal_steps(
    ahead: bool, saved: list[int], evaluated: list[int], tmp_path: Path
) -> None:
    one, other = trained(tmp_path / "timed", ahead, (3.0, 2.0))
    assert one == other
    assert one[1:] == (saved, evaluated)
    assert trained(tmp_path / "plain", ahead, (None, None))[0] == (one[0], [], [8])
