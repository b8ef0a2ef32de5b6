"""The credit of sampled tokens from rewards, values and divergences of a global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtrain.train.objectives import objective_of
from mtrain.train.policy import PolicyObjective
from mtrain.train.rollouts.credit import Credit, Scores, credit_of
from tests.support.objective_steps import run_of

# A turn of a tool stands between tokens of the first answer, and one behind it.
WEIGHTS = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 0]], dtype=torch.float64)
REWARDS = np.array([[2.0], [-1.0]])


def credited(name: str, divergence: float, **keys: Any) -> Credit:
    objective = objective_of(run_of(name, keys=keys))
    assert isinstance(objective, PolicyObjective)
    values = torch.full_like(WEIGHTS, 0.25) * WEIGHTS
    rewards = REWARDS if objective.per_token else REWARDS.reshape(1, 2)
    return credit_of(objective, rewards, Scores(WEIGHTS, divergence * WEIGHTS, values))


def test_credit_reward_is_at_the_last_sampled_token() -> None:
    """Discount by sampled tokens, not by those of the tool between them (verl 7278)."""
    found = credited("ppo", 0.0, gamma=0.5)
    assert found.returns is not None
    assert found.returns[0].tolist() == [0, 0.5, 1.0, 0, 2.0, 0]
    assert found.returns[1].tolist() == [0, 0, -0.25, -0.5, -1.0, 0]
    held = found.advantages[WEIGHTS.numpy() > 0]
    assert (held.mean(), held.std(ddof=1)) == (pytest.approx(0), pytest.approx(1))
    assert not found.advantages[WEIGHTS.numpy() == 0].any()


def test_credit_divergence_is_taken_off_rewards() -> None:
    """Take it off the reward of each token, or off that of an answer with one advantage."""
    found = credited("ppo", 0.1, kl_in_reward=2.0)
    assert found.returns is not None
    assert found.returns[0] == pytest.approx([0, 1.4, 1.6, 0, 1.8, 0])
    assert found.measured["rollout_kl"] == pytest.approx(0.1)
    plain = credited("rloo", 0.1, group_size=2)
    less = credited("rloo", 0.1, group_size=2, kl_in_reward=2.0)
    # Both answers have three sampled tokens: equal sums cancel among the others of a group.
    assert less.advantages == pytest.approx(plain.advantages)
    assert plain.advantages[:, 0].tolist() == [3.0, -3.0]
