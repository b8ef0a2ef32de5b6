"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): PPO without a critic."""

from __future__ import annotations

from torch import Tensor

from mtrain.train.critic import Estimates, generalized_advantages
from mtrain.train.objectives.ppo import Ppo


class ReinforcePlusPlus(Ppo):
    """A clipped ratio of each token times the reward that follows it, which is whitened over the
    step; `objective.kl_in_reward` takes the divergence of each token off its reward.
    """

    def estimates(self, rewards: Tensor, values: Tensor, weights: Tensor) -> Estimates:
        """Return the discounted sum of the rewards from each token on."""
        gamma = self.run.objective.gamma
        assert gamma is not None
        # Without a baseline: values are 0, and each error is a reward.
        return generalized_advantages(rewards, values.new_zeros(values.shape), weights, gamma, 1.0)


OBJECTIVE = ReinforcePlusPlus
