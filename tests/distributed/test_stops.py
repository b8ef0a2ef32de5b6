"""Requests to stop: runs save wherever they are in the loop, and a resumed run misses nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_endings import End, small, train
from tests.support.forked import run_ranks

ASKED = {"start": (0, 0), "step": (3, 2), "evaluation": (2, 1), "save": (4, 2)}
"""Moments of a request on one rank: the step that is saved, and the batches of the evaluation of
step 2 until then.
"""


def _run() -> RunConfig:
    """Return a run of five steps of one micro-batch, with an evaluation of two batches after every
    second one.
    """
    run = small(ranks=2, tp=2)
    batch = {"train_iters": 5, "eval_iters": 2, "global_batch_size": 2}
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"num_layers": 1}),
            "trainer": run.trainer.model_copy(update=batch),
            "checkpoint": run.checkpoint.model_copy(update={"save_interval": 4}),
        }
    )


@pytest.mark.full
def test_stops_save_and_resume_misses_nothing(tmp_path: Path) -> None:
    """Compare the final metrics with those of a run that was never stopped."""
    run = _run()

    def job() -> dict[str, tuple[End, int]]:
        from mtrain.ckpt import state
        from mtrain.ckpt.folder import committed
        from mtrain.train import assemble
        from mtrain.train.loop import step

        evaluated: list[int] = []
        moment = ""

        def asking(
            real: Callable[..., Any], name: str, at: int | None = None
        ) -> Callable[..., Any]:
            def asked(*args: Any, **kwargs: Any) -> Any:
                own = "evaluation" if kwargs.get("forward_only") else name
                if own == "evaluation":
                    evaluated.append(args[0].state.step)
                if (
                    moment == own
                    and dist.get_rank() == 1
                    and (at is None or args[0].state.step == at)
                ):
                    signal.raise_signal(signal.SIGUSR1)
                return real(*args, **kwargs)

            return asked

        assemble.build_model = asking(assemble.build_model, "start")
        step.run_schedule = asking(step.run_schedule, "step", 2)
        state.save = asking(state.save, "save")
        found = {"whole": (train(run, tmp_path / "whole"), 0)}
        for name in ASKED:
            home = tmp_path / name
            moment = name
            evaluated.clear()
            found[name] = train(run, home), evaluated.count(2)
            moment = ""
            found[f"{name}, resumed"] = train(run, home, committed(home / "checkpoints")[-1]), 0
        return found

    for ends in run_ranks(2, job):
        for name, (at, batches) in ASKED.items():
            end, count = ends[name]
            assert (end.error, end.steps, count) == ("Preempted", [f"step_{at:08d}"], batches), (
                name,
                end.said,
            )
            end, _ = ends[f"{name}, resumed"]
            assert (end.error, end.lines) == ("", 5), (name, end.said)
            assert _numbers(tmp_path / name) == _numbers(tmp_path / "whole"), name


def _numbers(home: Path) -> list[tuple[float | None, ...]]:
    lines = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
    return [
        tuple(line.get(key) for key in ("step", "loss", "valid_loss", "grad_norm", "samples"))
        for line in lines
    ]
