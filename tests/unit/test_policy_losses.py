"""Losses of sampled answers against TRL 1.16's formulas, restated here on random batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.data.answers import Answer, answer_batch
from mtrain.train.objectives.grpo import Grpo
from mtrain.train.objectives.rloo import Rloo
from mtrain.train.policy import ADVANTAGES, PolicyObjective, Tokens, divergence_of, importance_of

ROWS = 6
GROUP = 3
LENGTH = 12
MOST = 7
LOW = 0.2
HIGH = 0.28
BETA = 0.04
KINDS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo")


def objective_of(kind: str, **keys: Any) -> PolicyObjective:
    values: dict[str, Any] = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "group_size": GROUP}
    if kind == "rloo":
        return Rloo(SimpleNamespace(objective=ObjectiveConfig(name="rloo", **values, **keys)))  # type: ignore[arg-type]
    config = ObjectiveConfig(name="grpo", policy_loss=kind, **values, **keys)  # type: ignore[arg-type]
    return Grpo(SimpleNamespace(objective=config))  # type: ignore[arg-type]


def trl_advantages(kind: str, rewards: Tensor, scale: str) -> Tensor:
    """Return TRL's advantages of rewards [rows] of answers to one prompt after the other."""
    groups = rewards.view(-1, GROUP)
    if kind == "rloo":
        baseline = (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)
        return (groups - baseline).flatten()
    found = rewards - groups.mean(1).repeat_interleave(GROUP)
    if scale == "group":
        return found / (groups.std(1).repeat_interleave(GROUP) + 1e-4)
    return found / (rewards.std() + 1e-4) if scale == "batch" else found


def trl_loss(kind: str, lp: Tensor, old: Tensor, ref: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of `GRPOTrainer._compute_loss` on one process, without accumulation; `lp`,
    `old`, `ref` and `mask` are [rows, tokens], `a` is [rows].
    """
    gap = lp - old
    if kind == "rloo":  # RLOOTrainer: one ratio of the sums
        coef = torch.exp((gap * mask).sum(1))
        least = torch.min(coef * a, torch.clamp(coef, 1 - LOW, 1 + HIGH) * a)
        return -least.mean()
    if kind == "gspo":  # importance_sampling_level="sequence"
        gap = ((gap * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef = torch.exp(gap)
    a = a.unsqueeze(1)
    if kind == "cispo":
        # TRL's epsilon_high is the bound itself, and it has no lower one.
        each = -torch.clamp(coef, 1 - LOW, 1 + HIGH).detach() * a * lp
    else:
        each = -torch.min(coef * a, torch.clamp(coef, 1 - LOW, 1 + HIGH) * a)
    each = each + BETA * (torch.exp(ref - lp) - (ref - lp) - 1)
    if kind in ("grpo", "gspo"):
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if kind == "dr_grpo":
        return (each * mask).sum() / (each.shape[0] * MOST)
    return (each * mask).sum() / mask.sum()


def drawn(seed: int) -> tuple[list[Answer], Tensor, Tensor]:
    """Return answers of random lengths, and random log-probabilities [3, rows, tokens] of policy,
    old policy and reference, with rewards [rows].
    """
    dice = np.random.default_rng(seed)
    answers = []
    for _ in range(ROWS):
        count = int(dice.integers(1, MOST + 1))
        prompt = dice.integers(0, 50, int(dice.integers(1, LENGTH + 2 - count)))
        answers.append(Answer(prompt, dice.integers(0, 50, count), np.zeros(count, np.float32)))
    first = torch.from_numpy(-dice.exponential(2.0, (ROWS, LENGTH)))
    others = first + torch.from_numpy(dice.normal(0, 0.3, (2, ROWS, LENGTH)))
    return answers, torch.stack([first, *others]), torch.from_numpy(dice.integers(0, 3, ROWS) * 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_losses_equal_those_of_trl(kind: str, dtype: torch.dtype) -> None:
    """Compare value and gradient with 200 batches; both are divided by a count of whole batches."""
    objective = objective_of(kind, scale_rewards=None if kind == "rloo" else "group")
    for seed in range(200):
        answers, logs, rewards = drawn(seed)
        advantages = objective.advantages(rewards.numpy().reshape(-1, GROUP)).ravel()
        given = [
            Answer(one.prompt, one.ids, one.log_probabilities, float(a))
            for one, a in zip(answers, advantages, strict=True)
        ]
        batch = answer_batch(given, LENGTH, objective.run.objective.divisor, MOST)
        current, old, ref = logs.to(dtype)
        current.requires_grad_()
        weights = batch["loss_mask"].to(dtype)
        judged = objective.judge(Tokens(current, old, batch[ADVANTAGES].to(dtype), weights), None)  # type: ignore[literal-required]
        losses = judged.losses
        if kind != "rloo":
            losses = losses + BETA * divergence_of(current, ref, "k3")
        count = batch.get("loss_counts", batch["loss_mask"]).sum()
        loss = (losses * weights).sum() / count
        (slope,) = torch.autograd.grad(loss, current)
        mask = (batch["loss_mask"] > 0).double()
        lp = logs[0].clone().requires_grad_()
        a = trl_advantages(kind, rewards, "group")
        wanted = trl_loss(kind, lp, logs[1], logs[2], a, mask)
        (gradient,) = torch.autograd.grad(wanted, lp)
        # An fp32 weight of 1 / tokens has 24 bits.
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        assert torch.allclose(slope.double(), gradient, rtol=1e-5, atol=1e-6)


def test_policy_importance_is_bounded_per_token_or_answer() -> None:
    gap = torch.tensor([[0.1, 1.0, -1.0, 9.0], [0.3, 0.5, 9.0, 9.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    found = {
        kind: importance_of(gap, weights, kind, 2.0) * (weights > 0)
        for kind in ("truncated", "masked", "sequence_masked")
    }
    e = np.exp
    wanted = {
        "truncated": [[e(0.1), 2.0, e(-1.0), 0], [e(0.3), e(0.5), 0, 0]],
        "masked": [[e(0.1), 0, 0, 0], [e(0.3), e(0.5), 0, 0]],
        "sequence_masked": [[e(0.1)] * 3 + [0], [0, 0, 0, 0]],
    }
    for kind, rows in wanted.items():
        assert torch.allclose(found[kind], torch.tensor(rows, dtype=torch.float64)), kind


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_policy_advantages_equal_those_of_trl(scale: str) -> None:
    rewards = torch.from_numpy(np.random.default_rng(0).normal(size=12))
    found = objective_of("grpo", scale_rewards=scale).advantages(rewards.numpy().reshape(4, GROUP))
    assert np.allclose(found.ravel(), trl_advantages("grpo", rewards, scale).numpy(), atol=1e-12)


def test_policy_equal_rewards_have_no_advantage() -> None:
    same = np.full((2, GROUP), 0.7)
    for kind, scale in (("grpo", "group"), ("grpo", "batch"), ("rloo", None)):
        assert np.abs(objective_of(kind, scale_rewards=scale).advantages(same)).max() < 1e-9


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_policy_divergences_are_those_of_schulman(estimator: str) -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    wanted = {"k1": -x, "k2": x**2 / 2, "k3": torch.exp(x) - 1 - x}[estimator]
    assert torch.allclose(divergence_of(torch.zeros_like(x), x, estimator), wanted, atol=1e-12)
