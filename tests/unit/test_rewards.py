"""Rewards of answers: their values, and the limits of the processes that compute them."""

from __future__ import annotations

import math
import time
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


EQUAL = (
    ("$\\frac{14}{2}$", "7"),
    ("It is 0.5.", "\\frac12"),
    ("x^2+2x+1", "(x+1)^2"),
    ("$x^2+2x+1$", "$(x+1)^2$"),
    ("so \\boxed{42}", "42"),
    ("The answer is \\boxed{\\frac{1}{3}}", "1/3"),
    ("$\\sqrt{8}$", "2\\sqrt{2}"),
    ("50%", "0.5"),
    ("$1{,}000$", "1000"),
    ("1,000", "1000"),
    ("$\\{1,2,3\\}$", "\\{3,2,1\\}"),
    ("(1,2)", "(1, 2)"),
    ("\\([0,1)\\)", "[0, 1)"),
    ("$x=5$", "5"),
    ("$3\\cdot 10^2$", "300"),
    ("-7", "$-7$"),
    ("$\\sin^2 x+\\cos^2 x$", "1"),
    ("\\pi/2", "\\frac{\\pi}{2}"),
    ("2^{10}", "1024"),
    ("first 3 and then 4", "4"),
)
UNEQUAL = (
    ("8", "7"),
    ("", "7"),
    ("no number", "7"),
    ("$x^2$", "x^3"),
    ("\\boxed{4}", "42"),
    ("$\\frac{1}{3}$", "0.3"),
    ("$(1,2)$", "(2,1)"),
    ("$[0,1]$", "[0,1)"),
    ("-7", "7"),
    ("x=5", "6"),
    ("7 or 8", "7"),
    ("$\\{1,2\\}$", "\\{1,2,3\\}"),
    ("$\\sqrt2$", "1.41"),
    ("x^2+2x+1", "1"),
    ("$2^{11}$", "1024"),
    ("$a+b$", "a-b"),
    ("$\\pi$", "3.14"),
    ("\\boxed{}", "0"),
    ("$x<5$", "x>5"),
    ("$\\infty$", "5"),
)
HOSTILE = (
    "$9^{9^{9^{9}}}$",
    "$100000000!$",
    "$\\sum_{n=1}^{10^{12}} \\frac{1}{n^2}$",
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "$" + "+".join(f"x^{{{i}}}" for i in range(3000)) + "$",
)


def posed(text: str, right: str) -> Sampled:
    return sampled(text, record={"answer": right})


@pytest.mark.full
def test_rewards_math_compares_values() -> None:
    reward = reward_named("math")
    assert [pair for pair in EQUAL if reward(posed(*pair)) != 1.0] == []
    assert [pair for pair in UNEQUAL if reward(posed(*pair)) != 0.0] == []
    with pytest.raises(ValueError, match="no expression in the right answer"):
        reward(posed("7", "$ $"))


@pytest.mark.full
def test_rewards_math_hostile_answers_are_named() -> None:
    """Judge hostile expressions in processes: each is named in its time, and the next is judged."""
    judges = Judges(1, seconds=3.0, memory_gib=4.0)
    try:
        for text in HOSTILE:
            begun = time.monotonic()
            bad, good = judges.verdicts(["math"], [posed(text, "7"), posed("$14/2$", "7")])
            assert bad[0].why == "it took more than 3 s", text[:20]
            assert good[0].value == 1.0
            assert time.monotonic() - begun < 30
    finally:
        judges.close()


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
