"""Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.train.critic import Estimates, generalized_advantages
from mtrain.train.objectives import Metric
from mtrain.train.policy import Judged, PolicyObjective, Tokens, clipped_losses

APPROXIMATE_KL = Metric("approximate_kl", reduce="tokens")
"""The mean of log(old / current) over sampled tokens: an estimate of KL(old || current)."""


class Ppo(PolicyObjective):
    """A clipped ratio of each token times its own advantage over what a critic expected."""

    per_token = True

    def metrics(self) -> tuple[Metric, ...]:
        """Return those of a policy, and how far it moved from the one that sampled."""
        return (*super().metrics(), APPROXIMATE_KL)

    def estimates(self, rewards: Tensor, values: Tensor, weights: Tensor) -> Estimates:
        """Return advantages by `objective.gae_lambda`."""
        o = self.run.objective
        assert o.gamma is not None
        assert o.gae_lambda is not None
        return generalized_advantages(rewards, values, weights, o.gamma, o.gae_lambda)

    def judge(self, tokens: Tokens, group: dist.ProcessGroup | None) -> Judged:
        """Return the clipped loss of each token."""
        o = self.run.objective
        assert o.clip_ratio_low is not None
        assert o.clip_ratio_high is not None
        ratio = torch.exp(tokens.current - tokens.old)
        return clipped_losses(ratio, tokens.advantages, o.clip_ratio_low, o.clip_ratio_high)


OBJECTIVE = Ppo
