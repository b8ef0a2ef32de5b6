"""Findings of rules, with candidate fixes; only a fix that works is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.errors import Severity, sentence

Change = Mapping[str, Any]
"""Dotted key -> new value, applied together."""


@dataclass(frozen=True)
class Finding:
    """One broken rule with candidate fixes."""

    code: str
    path: str
    detail: str = ""
    """The numbers, or the cause where the code's words do not have it."""
    fixes: Sequence[Change] = ()
    """Changes that may correct it, the least surprising first."""
    severity: Severity = "error"
    """The severity; the code of a warning overrides it."""
    hint: str = ""
    """Advice if no change of keys can correct it, as for a missing path."""
    also: tuple[str, ...] = ()
    """Other keys of the rule that its text does not name."""
    unset: bool = False
    """True if the key must not be set. If no fix keeps a provided value, the advice is to leave it
    out.
    """
    lacks: Literal["", "device", "input"] = ""
    """True if only an input or a device is missing. A run is refused; `check`, which validates for
    any machine, warns.
    """

    @property
    def rule(self) -> str:
        """Return the finding as `cannot X because Y (numbers)`, in the words of its code."""
        return sentence(self.code, self.detail)


DP = "parallel.ranks parallel.tp parallel.pp parallel.cp"
"""Keys that `ParallelConfig.dp` reads."""


def each(key: str, values: Iterable[Any]) -> list[Change]:
    """Return the changes that set a key to one of `values`."""
    return [{key: value} for value in values]


def divisors(n: int, limit: int | None = None) -> list[int]:
    """Return the divisors of `n` up to `limit`, ascending."""
    return [d for d in range(1, min(n, limit or n, 4096) + 1) if n % d == 0]


def nearest(value: int, candidates: list[int]) -> list[int]:
    """Return `candidates` by distance from `value`, the smaller of two equally near first."""
    return sorted(candidates, key=lambda c: (abs(c - value), c))


def listed(values: list[int], limit: int = 8) -> str:
    """Return numbers as text: `1, 2, 4`; long lists end in dots."""
    text = ", ".join(str(v) for v in values[:limit])
    return f"{text}, ..." if len(values) > limit else text


def multiples(value: int, step: int) -> list[int]:
    """Return positive multiples of `step` around `value`, the nearest first."""
    below = value // step * step
    return nearest(value, [m for m in {below, below + step} if m >= step])
