"""The right answer, letter by letter."""

from __future__ import annotations

from mtrain.train.rewards import Sampled


def reward(sampled: Sampled) -> float:
    """Return 1 if the text is the right answer, without the blanks around both; else 0."""
    return float(sampled.text.strip() == sampled.answer().strip())


REWARD = reward
