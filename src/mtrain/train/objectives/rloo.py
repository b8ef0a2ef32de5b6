"""REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from mtrain.train.policy import (
    Judged,
    PolicyObjective,
    Tokens,
    clipped_losses,
    summed_over_answers,
)


class Rloo(PolicyObjective):
    """The clipped ratio of whole answers times their reward without the mean of the others."""

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return rewards without the mean of the others of their group."""
        return leave_one_out(rewards)

    def judge(self, tokens: Tokens, group: dist.ProcessGroup | None) -> Judged:
        """Return the loss of each answer at each of its tokens; the mean has its gradient."""
        o = self.run.objective
        assert o.clip_ratio_low is not None
        assert o.clip_ratio_high is not None
        return answer_losses(tokens, o.clip_ratio_low, o.clip_ratio_high, group)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [groups, answers] without the mean of the others of their group, float64."""
    rewards = rewards.astype(np.float64)
    others = rewards.shape[1] - 1
    return rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / others


def answer_losses(
    tokens: Tokens, low: float, high: float, group: dist.ProcessGroup | None = None
) -> Judged:
    """Return the clipped loss of each answer, whose ratio is the product over its tokens, at each
    token; the mean over the tokens is the loss of the answer, and so is its gradient.
    """
    gaps, count = summed_over_answers(tokens.current - tokens.old, tokens.weights, group)
    # The log-ratio of an answer is a sum: a mean over its tokens takes each of them so many times.
    own = 1 + count.to(tokens.current.dtype) * (tokens.current - tokens.current.detach())
    ratio = gaps.exp().to(own.dtype) * own
    return clipped_losses(ratio, tokens.advantages, low, high)


OBJECTIVE = Rloo
