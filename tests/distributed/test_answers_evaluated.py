"""Evaluations on prompts: rewards of answers to the validation split, during a run and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_answers import Recorded, prompts_run
from tests.distributed.test_endings import End, train
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import LAYOUTS
from tests.support.runs import whole_tensors


def evaluated_run(home: Path, every: int, **given: Any) -> RunConfig:
    trainer = {"eval_interval": every, "eval_iters": 2 if every else 0}
    optim = {"lr": 1e-2, "warmup_iters": 0}
    run = prompts_run(home, steps=2, trainer=trainer, optim=optim, **given)
    data = run.data.model_copy(update={"split": (0.9, 0.1, 0.0)})
    return run.model_copy(update={"data": data})


def recorded(run: RunConfig, home: Path) -> End:
    from mtrain.train.rollouts import engines, feed

    engines.LocalEngine = Recorded  # type: ignore[misc, assignment]
    feed.Judges = Recorded  # type: ignore[misc, assignment]
    return train(run, home)


def lines(home: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if "valid_loss" in line]


@pytest.mark.full
def test_answers_evaluated_are_the_same_in_layouts(tmp_path: Path) -> None:
    """Evaluate after each step; the split and the seeds decide what is answered."""
    import_engine()
    run_ranks(1, recorded, evaluated_run(tmp_path, 1), tmp_path / "one")
    layout = LAYOUTS["pp2dp2"]
    run_ranks(4, recorded, evaluated_run(tmp_path, 1, **layout), tmp_path / "two")
    first, second = lines(tmp_path / "one")
    for line, same in zip(lines(tmp_path / "two"), (first, second), strict=True):
        known = {key: value for key, value in same.items() if key.startswith("valid_")}
        assert {key: line[key] for key in known} == known
    # The engine and the judges are functions of the number of a sample.
    assert first["valid_reward"] == second["valid_reward"] == -first["valid_loss"]
    assert first["valid_samples"] == 16
    assert 0 < first["valid_pass_share"] < first["valid_pass_at_4"] <= 1


@pytest.mark.full
def test_answers_evaluated_keep_training_and_verb_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_engine()
    ends = [
        run_ranks(1, train, evaluated_run(tmp_path, every), tmp_path / str(every))[0]
        for every in (0, 1)
    ]
    assert [end.error for end in ends] == ["", ""]
    kept = "checkpoints/step_00000002"
    plain, watched = (whole_tensors(tmp_path / name / kept) for name in ("0", "1"))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)

    def verb() -> dict[str, float]:
        from mtrain.train.generate import evaluation

        said: list[str] = []
        evaluation.say_page = said.append  # type: ignore[assignment]
        run = evaluated_run(tmp_path, 1)
        evaluation.evaluate(run, tmp_path / "1" / kept, tmp_path / "tokenizer.json", 16, True)
        return json.loads(said[0])

    (found,) = run_ranks(1, verb)
    last = lines(tmp_path / "1")[-1]
    for key in ("reward", "reward_exact", "pass_share", "answer_tokens", "samples"):
        assert found[key] == last[f"valid_{key}"]
