"""Mathematical equality, by math-verify (`pip install 'mtrain[rl]'`)."""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from mtrain.train.rewards import Sampled

MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[|(?<!\\)%")
"""Marks by which math-verify finds an expression, and a percentage."""
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]{2}")

# It warns at every call that its own time limits are off: they need the signals of a main thread,
# and this process has a limit already.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def reward(sampled: Sampled) -> float:
    """Return 1 if the last expression of the text equals the right answer; else 0.

    Raises:
        ValueError: the right answer has no expression.
    """
    right = _read(sampled.answer(), whole=True)
    if not right:
        raise ValueError(f"no expression in the right answer {sampled.answer()[:100]!r}")
    text = sampled.text.strip()
    # In x^2+1 without marks, math-verify would read the 1 at its end.
    whole = WORD.search(COMMAND.sub("", text)) is None
    return float(verify(right, _read(text, whole=whole), timeout_seconds=None))


def _read(text: str, *, whole: bool) -> list[Any]:
    """Return the last expression of a text; a `whole` one is an expression, also without marks."""
    if whole and not MARKED.search(text):
        text = f"\\boxed{{{text}}}"
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


# The first call makes tables for a second or more, which the limit of an answer should not cover.
verify(_read("1", whole=True), _read("1", whole=True), timeout_seconds=None)
REWARD = reward
