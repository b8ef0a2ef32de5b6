"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from mtrain.train.policy import (
    SMALL,
    Judged,
    PolicyObjective,
    Tokens,
    clipped_losses,
    summed_over_answers,
)


class Grpo(PolicyObjective):
    """A clipped ratio of tokens times the advantage of their answer in its group;
    `objective.policy_loss` and `objective.scale_rewards` have the sources.
    """

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return rewards without the mean of their group, divided as `objective.scale_rewards`
        says.
        """
        return group_advantages(rewards, self.run.objective.scale_rewards or "group")

    def judge(self, tokens: Tokens, group: dist.ProcessGroup | None) -> Judged:
        """Return the loss of each token by `objective.policy_loss`."""
        o = self.run.objective
        assert o.clip_ratio_low is not None
        assert o.clip_ratio_high is not None
        kind = o.policy_loss or "dapo"
        return policy_losses(tokens, kind, o.clip_ratio_low, o.clip_ratio_high, group)


def group_advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Return the advantages of rewards [groups, answers], float64: standard deviations are those of
    samples, as in TRL.
    """
    rewards = rewards.astype(np.float64)
    found = rewards - rewards.mean(axis=1, keepdims=True)
    if scale == "group":
        return found / (rewards.std(axis=1, ddof=1, keepdims=True) + SMALL)
    if scale == "batch":
        return found / (rewards.std(ddof=1) + SMALL)
    return found


def policy_losses(
    tokens: Tokens, kind: str, low: float, high: float, group: dist.ProcessGroup | None = None
) -> Judged:
    """Return the loss of each token by `objective.policy_loss`, with clips at 1 - low and 1 +
    high.
    """
    ratio = (tokens.current - tokens.old).exp()
    if kind == "cispo":
        # The weight is a constant, so that a clipped token keeps a gradient.
        bounded = ratio.detach().clamp(1 - low, 1 + high)
        clipped = bounded != ratio.detach()
        return Judged(-bounded * tokens.advantages * tokens.current, clipped)
    if kind == "gspo":
        gaps, count = summed_over_answers(tokens.current - tokens.old, tokens.weights, group)
        # Each token has the ratio of its answer, and its own share of that ratio's gradient.
        own = (tokens.current - tokens.current.detach()).exp()
        ratio = (gaps / count).exp().to(own.dtype) * own
    return clipped_losses(ratio, tokens.advantages, low, high)


OBJECTIVE = Grpo
