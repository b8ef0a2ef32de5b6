"""Draws among the likeliest tokens: sampler and trainer renormalise over the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config.schema.run import RunConfig
from tests.distributed.test_answers import Recorded, prompts_run, records
from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.objective_steps import LAYOUTS
from tests.support.runs import whole_tensors

LIMITS = {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7}


def limited_run(home: Path, **given: Any) -> RunConfig:
    """Return a run whose sampler leaves out unlikely tokens."""
    run = prompts_run(home, **given)
    return run.model_copy(update={"rollout": run.rollout.model_copy(update=LIMITS)})


def on_one_side(run: RunConfig, folder: Path) -> list[dict[str, float]]:
    """Return the records of a trainer that does not renormalise (TRL 6789)."""
    from mtrain.data import answers

    answers._among = lambda given, labels: torch.zeros(0)
    real = answers.cast
    answers.cast = lambda kind, batch: real(  # type: ignore[assignment]
        kind, {key: value for key, value in batch.items() if key != "drawn_among"}
    )
    return records(run, folder, False)


@pytest.mark.parametrize("layout", some(["single", "tp2sp", "cp2", "pp2", "dp2"], []))
def test_limited_log_probabilities_agree_in_training(layout: str, tmp_path: Path) -> None:
    import_engine()
    run = limited_run(tmp_path, **LAYOUTS.get(layout, {}))
    for steps in run_ranks(run.parallel.ranks, records, run, tmp_path, False):
        for step in steps:
            assert step["sampler_gap_max"] < 1e-5
            assert step["gen_kl_error"] < 1e-9
    if layout == "single":
        (steps,) = run_ranks(1, on_one_side, run, tmp_path / "faulty")
        assert all(step["sampler_gap"] > 0.1 for step in steps)


class Limited(Recorded):
    """Recorded answers whose tokens were drawn among a few."""

    def generate(self, prompts: Any, sampling: Any) -> Any:
        found = []
        for rollout in super().generate(prompts, sampling):
            dice = np.random.default_rng(rollout.prompt.number)
            sets = [{one, *dice.integers(3, 300, 4).tolist()} for one in rollout.ids]
            among = tuple(tuple(sorted(ids)) for ids in sets)
            found.append(replace(rollout, among=among))
        return found


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "pp2", "micro8"])
def test_limited_split_is_the_same_step(layout: str, tmp_path: Path) -> None:
    import_engine()
    wanted = run_ranks(1, records, limited_run(tmp_path), tmp_path / "one", Limited)[0]
    whole = run_ranks(1, records, prompts_run(tmp_path), tmp_path / "whole", Recorded)[0]
    assert abs(wanted[0]["sampler_gap"] - whole[0]["sampler_gap"]) > 0.1
    run = limited_run(tmp_path, **LAYOUTS[layout])
    for found in run_ranks(run.parallel.ranks, records, run, tmp_path / "two", Limited):
        for step, same in zip(found, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=2e-5, abs=2e-6) for k, v in same.items()}
    inside = Path("1/step_00000000")
    here = whole_tensors(tmp_path / "two" / inside)
    for name, value in whole_tensors(tmp_path / "one" / inside).items():
        assert torch.allclose(here[name], value, rtol=1e-4, atol=1e-6), name


def test_limited_gradient_is_that_of_masked_logits() -> None:
    """Compare with a softmax over all logits of which others are left out, in fp64."""
    from mtrain.mcore.models.limited import limited_log_probabilities

    torch.manual_seed(1)
    hidden = torch.randn(7, 6, requires_grad=True)
    weight = torch.randn(20, 6, requires_grad=True)
    among = torch.stack([torch.randperm(20)[:4] for _ in range(7)])
    labels = among[:, 2].clone()
    among[3, 3] = -1
    found = limited_log_probabilities(hidden, weight, labels, among, temperature=0.7, soft_cap=5.0)
    logits = 5.0 * torch.tanh(hidden.double() @ weight.double().t() / 5.0) / 0.7
    kept = torch.zeros(7, 21, dtype=torch.bool).scatter(1, among % 21, True)[:, :20]
    expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    expected = expected.gather(1, labels[:, None])[:, 0]
    assert torch.allclose(found.double(), expected, atol=1e-6)
    weights = torch.randn(7)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), [hidden, weight]),
        torch.autograd.grad((expected * weights).sum(), [hidden, weight]),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)
    labels[0] = (set(range(20)) - set(among[0].tolist())).pop()
    assert limited_log_probabilities(hidden, weight, labels, among)[0] == -torch.inf


def test_limited_draws_keep_at_most_k_of_equal_logits() -> None:
    from mtrain.train.generate.request import Sampling
    from mtrain.train.generate.sampling import draw_among

    sampling = Sampling(top_k=3, temperature=0.5)
    token, value, among = draw_among(torch.zeros(9), sampling, torch.Generator().manual_seed(1))
    assert len(among) == 3
    assert token in among
    assert value == pytest.approx(-np.log(3))
