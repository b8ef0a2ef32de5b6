"""A row of the report of `doctor`: a check, its verdict, the number measured, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "slow", "wrong"]


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    name: str
    verdict: Verdict
    """ok; slow: a run starts, and loses speed or safety; wrong: a run would fail."""
    measured: str
    """The finding in words, with its numbers."""
    fix: str = ""
    """The remedy; empty for ok."""
    value: float | None = None
    """The number measured; None: the check measures none."""
    unit: str = ""


def ok(name: str, measured: str, value: float | None = None, unit: str = "") -> Row:
    """Return a row without a fault."""
    return Row(name, "ok", measured, "", value, unit)


def slow(name: str, measured: str, fix: str, value: float | None = None, unit: str = "") -> Row:
    """Return a row of a fault that costs speed or safety."""
    return Row(name, "slow", measured, fix, value, unit)


def wrong(name: str, measured: str, fix: str, value: float | None = None, unit: str = "") -> Row:
    """Return a row of a fault that would end a run."""
    return Row(name, "wrong", measured, fix, value, unit)
