"""Answers of several turns in a run: any layout has the same ones, and a resumed run too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_answers import prompts_run
from tests.distributed.test_endings import End, train
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import LAYOUTS
from tests.support.runs import whole_tensors

PLUG_IN = """
def talkative(messages, columns):
    text = "go on, " + columns["answer"]
    return [{"role": "user", "content": text}] if len(messages) < 6 else None
"""


def turns_run(home: Path, **given: Any) -> RunConfig:
    """Return a run in which some turns end by chance, as every token has about one in 320."""
    trainer = {"global_batch_size": 64}
    run = prompts_run(home, trainer=trainer, optim={"lr": 1e-2, "warmup_iters": 0}, **given)
    turns = {"environment": "talkative", "max_tokens": 60, "max_turns": 3}
    sections = {
        "rollout": run.rollout.model_copy(update=turns),
        "data": run.data.model_copy(update={"seq_length": 96}),
    }
    return run.model_copy(update=sections)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talking.py").write_text(PLUG_IN)
    info = tmp_path / "talking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: talking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mtrain.environments]\ntalkative = talking:talkative\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def sampled(run: RunConfig) -> list[Any]:
    """Return tokens, masks and messages of the answers of a step."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        feed: Any = context.prefetcher
        batches = feed.take(0, run.trainer.batch)
        (step,) = feed._steps.values()
        found = [(one.ids, one.own, one.messages) for one in step.rollouts]
        learned = sum(float((batch["loss_mask"] > 0).sum()) for batch in batches)
        if world.size == 1:
            assert learned == sum(sum(own) for _, own, _ in found)
        context.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", some(["tp2sp", "pp2", "dp2", "tp2pp2"], ["tp2sp"]))
def test_turns_layout_keeps_answers(layout: str, environment: None, tmp_path: Path) -> None:
    import_engine()
    wanted = run_ranks(1, sampled, turns_run(tmp_path))[0]
    # Some answers have a second turn, and nothing of the user between is learned.
    assert sum(len(messages) > 1 for _, _, messages in wanted) >= 2
    run = turns_run(tmp_path, **LAYOUTS[layout])
    for found in run_ranks(run.parallel.ranks, sampled, run):
        assert found == wanted


@pytest.mark.full
def test_turns_resumed_run_is_bitwise_equal(environment: None, tmp_path: Path) -> None:
    run = turns_run(tmp_path, steps=2)
    saves = run.checkpoint.model_copy(update={"save_interval": 1, "keep": None})
    run = run.model_copy(update={"checkpoint": saves})

    def job(home: Path, begin: Path | None) -> End:
        return train(run, home, begin)

    import_engine()
    kept = tmp_path / "whole/checkpoints"
    (end,) = run_ranks(1, job, tmp_path / "whole", None)
    assert end.error == ""
    (end,) = run_ranks(1, job, tmp_path / "resumed", kept / "step_00000001")
    assert end.error == ""
    first, second = (
        whole_tensors(tmp_path / name / "checkpoints/step_00000002")
        for name in ("whole", "resumed")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
