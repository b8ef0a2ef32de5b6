"""The length of an answer, as in DAPO's soft punishment (arXiv:2503.14476, equation 13), plus 1."""

from __future__ import annotations

from mtrain.train.rewards import Sampled


def reward(sampled: Sampled) -> float:
    """Return 1 up to `rollout.free_tokens`, then a share that falls to 0 at the most tokens."""
    free = sampled.settings["free_tokens"] or sampled.most_tokens // 2
    if sampled.tokens <= free:
        return 1.0
    return max(0.0, (sampled.most_tokens - sampled.tokens) / (sampled.most_tokens - free))


REWARD = reward
