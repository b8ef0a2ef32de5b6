"""A form that the whole answer has to have."""

from __future__ import annotations

import re

from mtrain.train.rewards import Sampled


def reward(sampled: Sampled) -> float:
    """Return 1 if `rollout.pattern` matches the whole text; else 0."""
    return float(re.fullmatch(sampled.settings["pattern"], sampled.text, re.DOTALL) is not None)


REWARD = reward
