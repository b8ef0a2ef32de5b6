"""Rewards of answers: their values, and the limits of the processes that compute them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mtrain.train.rewards import Sampled, reward_named
from mtrain.train.rollouts.judges import Judges

PLUG_IN = """
import time
def endless(sampled): time.sleep(60)
def broken(sampled): raise ValueError("no number in " + sampled.text)
def infinite(sampled): return float("inf")
def greedy(sampled): return len(bytearray(1 << 36))
def talking(sampled): print("hello"); return 0.25
"""
NAMES = ("endless", "broken", "infinite", "greedy", "talking")
ENTRIES = "\n".join(f"{name} = own:{name}" for name in NAMES)


def sampled(text: str, **more: Any) -> Sampled:
    settings = {"answer_column": "answer", "pattern": "<a>.*</a>", "free_tokens": 4}
    given: dict[str, Any] = {
        "record": {"answer": " 7 "},
        "tokens": 6,
        "most_tokens": 8,
        "ended": True,
    }
    given |= more
    return Sampled(text, settings=settings, **given)


@pytest.mark.parametrize(
    ("name", "one", "wanted"),
    [
        ("exact", sampled("7\n"), 1.0),
        ("exact", sampled("70"), 0.0),
        ("format", sampled("<a>\n7</a>"), 1.0),
        ("format", sampled("so <a>7</a>"), 0.0),
        ("length", sampled("", tokens=4), 1.0),
        ("length", sampled(""), 0.5),
        ("length", sampled("", tokens=8), 0.0),
    ],
)
def test_rewards_have_their_values(name: str, one: Sampled, wanted: float) -> None:
    assert reward_named(name)(one) == wanted


def test_rewards_math_compares_values() -> None:
    pytest.importorskip("math_verify")
    assert reward_named("math")(sampled("It is $\\frac{14}{2}$.")) == 1.0


@pytest.mark.full
def test_rewards_failures_are_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name what fails, and go on with the next answer in another process."""
    (tmp_path / "own.py").write_text(PLUG_IN)
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mtrain.rewards]\n{ENTRIES}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    judges = Judges(2, seconds=2.0, memory_gib=1.0)
    try:
        judges.verdicts(["exact"], [sampled("7")] * 4)
        names = ["endless", "broken", "infinite", "greedy", "talking", "absent", "exact"]
        (found,) = judges.verdicts(names, [sampled("7")])
    finally:
        judges.close()
    assert [verdict.value for verdict in found[4:5] + found[6:]] == [0.25, 1.0]
    for verdict, why in zip(
        found, ("more than 2 s", "no number in 7", "returned inf", "MemoryError"), strict=False
    ):
        assert math.isnan(verdict.value)
        assert why in verdict.why
    assert "no installed package has it" in found[5].why
