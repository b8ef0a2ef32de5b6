"""Advantages and value losses of PPO against the formulas of verl 0.9.1's `core_algos`, restated
with loops over single tokens in fp64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtrain.train.critic import generalized_advantages, value_losses, whitened

GAMMA = 0.97
LAM = 0.9
CLIP = 0.2


def drawn(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and weights [3, 9], with tokens of others between those that count."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn((3, 9), generator=generator, dtype=dtype)
    values = torch.randn((3, 9), generator=generator, dtype=dtype)
    weights = (torch.rand((3, 9), generator=generator) > 0.3).to(dtype)
    weights[:, 4] = 1
    weights[0, 5:7] = 0
    return rewards, values, weights


def estimated(rewards: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return advantages and returns: sums of discounted errors over the tokens that count."""
    advantages = torch.zeros_like(values, dtype=torch.float64)
    for row in range(len(values)):
        places = [t for t in range(values.shape[1]) if weights[row, t]]
        errors = []
        for i, t in enumerate(places):
            after = float(values[row, places[i + 1]]) if i + 1 < len(places) else 0.0
            errors.append(float(rewards[row, t]) + GAMMA * after - float(values[row, t]))
        for i, t in enumerate(places):
            advantages[row, t] = sum(
                (GAMMA * LAM) ** (j - i) * errors[j] for j in range(i, len(places))
            )
    return advantages, torch.where(weights > 0, advantages + values.double(), 0.0)


@pytest.mark.parametrize("batches", [3, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_critic_equals_the_formulas(dtype: torch.dtype, batches: int) -> None:
    """Pass over observation spans without losing what comes behind them (verl 7278)."""
    bounds = 0
    for seed in range(batches):
        rewards, values, weights = drawn(seed, dtype)
        found = generalized_advantages(rewards, values, weights, GAMMA, LAM)
        advantages, returns = estimated(rewards, values, weights)
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
        assert torch.allclose(found.advantages.double(), advantages, **tolerance)
        assert torch.allclose(found.returns.double(), returns, **tolerance)
        counted = advantages[weights > 0]
        white = (counted - counted.mean()) * torch.rsqrt(counted.var() + 1e-8)
        made = whitened(found.advantages, weights)
        assert torch.allclose(made[weights > 0].double(), white, **tolerance)
        assert not made[weights == 0].any()
        new = (values + torch.randn_like(values) / 4).requires_grad_()
        losses, clipped = value_losses(new, values, found.returns, CLIP)
        exact = new.detach().double().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        each = (x.flatten() for x in (exact, values, found.returns))
        for v, old, target in zip(*each, strict=True):
            bound = torch.clamp(v, float(old) - CLIP, float(old) + CLIP)
            total = total + 0.5 * torch.maximum((v - target) ** 2, (bound - target) ** 2)
        assert float(losses.sum()) == pytest.approx(float(total), rel=1e-6)
        (slope,) = torch.autograd.grad(losses.sum(), new)
        (wanted,) = torch.autograd.grad(total, exact)
        assert torch.allclose(slope.double(), wanted, rtol=1e-5, atol=1e-6)
        bounds += int(clipped.sum())
    assert bounds


def test_critic_needs_two_tokens_for_a_variance() -> None:
    with pytest.raises(ValueError, match="1 tokens"):
        whitened(torch.ones(1, 2), torch.tensor([[1.0, 0.0]]))
