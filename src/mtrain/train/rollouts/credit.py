"""The credit of sampled tokens: advantages, and what a critic learns from, as a pure function of a
global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mtrain.train.critic import whitened
from mtrain.train.policy import PolicyObjective


@dataclass(frozen=True)
class Credit:
    """Numbers of the labels of a global batch, [answers, tokens] each."""

    advantages: np.ndarray
    returns: np.ndarray | None = None
    values: np.ndarray | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the record of the step."""


@dataclass(frozen=True)
class Scores:
    """Numbers that models gave the labels of a global batch, fp64 [answers, tokens] each on the
    host, 0 where no token was sampled.
    """

    weights: Tensor
    """1 at sampled tokens."""
    divergence: Tensor
    """log(policy / reference); 0 without a reference in the reward."""
    values: Tensor
    """Values of the critic; 0 without one."""


def credit_of(objective: PolicyObjective, rewards: np.ndarray, scores: Scores) -> Credit:
    """Return the credit of the answers of a global batch from their rewards, float64 [groups,
    answers]: a pure function, so every rank has the same.
    """
    o = objective.run.objective
    weights = scores.weights
    taken_off = o.kl_in_reward * scores.divergence
    measured = {}
    if o.kl_in_reward:
        measured["rollout_kl"] = float(scores.divergence.sum() / weights.sum())
    if not objective.per_token:
        judged = rewards - taken_off.sum(1).reshape(rewards.shape).numpy()
        each = objective.advantages(judged).ravel()
        return Credit(np.broadcast_to(each[:, None], weights.shape), measured=measured)
    received = -taken_off
    # The last token that the policy sampled; a turn of a tool may stand behind it.
    last = weights.shape[1] - 1 - weights.flip(1).argmax(1)
    received[torch.arange(len(last)), last] += torch.from_numpy(rewards.ravel())
    found = objective.estimates(received, scores.values, weights)
    advantages = whitened(found.advantages, weights).numpy()
    if not o.criticises:
        return Credit(advantages, measured=measured)
    measured |= _explained(scores.values, found.returns, weights)
    return Credit(advantages, found.returns.numpy(), scores.values.numpy(), measured)


def _explained(values: Tensor, returns: Tensor, weights: Tensor) -> dict[str, float]:
    """Return means of values and returns of sampled tokens, and the share of the returns' variance
    that the values explain.
    """
    held = weights > 0
    target = returns[held]
    spread = float(target.var())
    left = float((target - values[held]).var())
    return {
        "value_mean": float(values[held].mean()),
        "return_mean": float(target.mean()),
        "explained_variance": 1 - left / spread if spread else 0.0,
    }
