"""Findings of a rule: candidate fixes, of which only one that works is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.config.schema.run import RunConfig
from mtrain.errors import Severity

Change = Mapping[str, Any]
"""Dotted key -> new value, applied together."""


@dataclass(frozen=True)
class Finding:
    """One broken rule with candidate fixes."""

    code: str
    path: str
    rule: str
    fixes: tuple[Change, ...] = ()
    """Changes that may correct it, the least surprising first."""
    severity: Severity = "error"
    """A finding whose code is one of a warning is a warning, whatever stands here."""
    hint: str = ""
    """What to say where no change of keys can correct it: a path that does not exist."""
    also: tuple[str, ...] = ()
    """Other keys that the rule is about, where its text does not name them."""
    unset: bool = False
    """True where a key may not be set at all.

    Where no fix keeps what somebody gave it, words say to leave it out.
    """
    lacks: Literal["", "device", "input"] = ""
    """What is not there yet, though nothing is wrong: a device that auto did not find, an input
    that has to be named. A run is refused for it; `check`, which validates for wherever the run
    will be, warns.
    """


DP = "parallel.ranks parallel.tp parallel.pp parallel.cp"
"""Keys that `ParallelConfig.dp` reads."""


def dp_of(run: RunConfig) -> int:
    """Return `run.parallel.dp`."""
    return run.parallel.dp


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Return the divisors of `n` up to `limit`, rising."""
    return [d for d in range(1, min(n, limit or n, 4096) + 1) if n % d == 0]


def nearest(value: int, candidates: list[int]) -> list[int]:
    """Sort `candidates` by their distance from `value`, the smaller of two equally near first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


def listed(values: list[int], limit: int = 8) -> str:
    """Return numbers in a sentence: `1, 2, 4`; long lists end in dots."""
    text = ", ".join(str(v) for v in values[:limit])
    return f"{text}, ..." if len(values) > limit else text


def multiples(value: int, step: int) -> list[int]:
    """Return the multiples of `step` around `value`, the nearest first; never below `step`."""
    below = value // step * step
    return nearest(value, [m for m in {below, below + step} if m >= step])
