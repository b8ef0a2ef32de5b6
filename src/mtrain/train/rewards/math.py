"""Mathematical equality, by math-verify (`pip install 'mtrain[rl]'`)."""

from __future__ import annotations

from mtrain.train.rewards import Sampled


def reward(sampled: Sampled) -> float:
    """Return 1 if the last expression of the text equals the right answer; else 0."""
    from math_verify import parse, verify

    # Its own time limits need the signals of a main thread; the process has one already.
    right = parse(sampled.answer(), parsing_timeout=None)
    found = parse(sampled.text, parsing_timeout=None)
    return float(verify(right, found, timeout_seconds=None))


REWARD = reward
