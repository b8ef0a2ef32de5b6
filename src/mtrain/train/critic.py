"""Advantages and losses of PPO with a critic, as pure functions of tokens.

Every function returns sums or values of tokens: only the trainer divides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 1e-8
"""Added to a variance, so that equal advantages have a quotient."""


class Estimates(NamedTuple):
    """Advantages of the tokens of rollouts by a critic's values, [b, s] each."""

    advantages: Tensor
    returns: Tensor
    """The targets of the values."""


def generalized_advantages(
    rewards: Tensor, values: Tensor, weights: Tensor, gamma: float, lam: float
) -> Estimates:
    """Return advantages by generalised advantage estimation (Schulman et al. 2015,
    arXiv:1506.02438, equation 16), not whitened.

    Tokens of weight 0, which a user or a tool wrote, are passed over: the estimate goes on behind
    them as if they were not there, and they have none of their own.

    Args:
        rewards: of each token, [b, s]; usually 0 but for the last one of an answer.
        values: of each token before it was sampled, as the critic gave them.
        weights: 1 where the policy sampled the token, else 0.
        gamma: the discount of a token.
        lam: the weight of further tokens; 1 sums their rewards.
    """
    following = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(following)
    advantages = torch.zeros_like(values)
    counts = weights > 0
    for place in range(values.shape[1] - 1, -1, -1):
        here = counts[:, place]
        error = rewards[:, place] + gamma * following - values[:, place]
        running = torch.where(here, error + gamma * lam * running, running)
        following = torch.where(here, values[:, place], following)
        advantages[:, place] = torch.where(here, running, 0.0)
    return Estimates(advantages, torch.where(counts, advantages + values, 0.0))


def whitened(advantages: Tensor, weights: Tensor) -> Tensor:
    """Return advantages with mean 0 and variance 1 over all tokens that count, [answers, tokens] of
    the whole global batch.

    Raises:
        ValueError: fewer than two tokens count, so that they have no variance.
    """
    counted = advantages[weights > 0].double()
    if len(counted) < 2:
        raise ValueError(f"advantages of {len(counted)} tokens have no variance")
    scaled = (advantages.double() - counted.mean()) * (counted.var() + SMALL).rsqrt()
    return torch.where(weights > 0, scaled, 0.0).to(advantages.dtype)


def value_losses(
    values: Tensor, old: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each value, and whether the bound decides it, [b, s] each.

    A value that moved further than `clip` from the `old` one of the rollout has the larger error of
    itself and of the bound (Engstrom et al. 2020, arXiv:2005.12729, section 3).
    """
    bounded = old + (values - old).clamp(-clip, clip)
    plain = (values - returns).square()
    clipped = (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain
