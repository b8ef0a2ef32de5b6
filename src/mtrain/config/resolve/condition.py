"""Conditions on other keys as data: `parallel.vpp>1 and parallel.fsdp=none`.

A term is `KEY` (set, and not false), `KEY=WORD`, `KEY=WORD|WORD` or `KEY>NUMBER`. mtrain checks the
same text on a configuration and on flags that it is reading, and prints it in messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TERM = re.compile(r"(?P<key>[a-z][\w.]*)(?:=(?P<words>[^>=]+)|>(?P<above>\d+))?\Z")


@dataclass(frozen=True)
class Term:
    """One term of a condition."""

    key: str
    words: tuple[str, ...] = ()
    """The values that fulfil it; empty: any value that is set."""
    above: int | None = None

    def holds(self, value: Any) -> bool:
        """Return whether the term holds for a value; an undecided null counts as not true."""
        if self.above is not None:
            # Flags are judged while they are read, when other keys may still be unknown.
            return value is not None and value > self.above
        if self.words == ("false",):
            return not value
        return _spelled(value) in self.words if self.words else bool(value)

    def __str__(self) -> str:
        if self.above is not None:
            return f"a {self.key} above {self.above}"
        if not self.words:
            return f"a {self.key}"
        head = f"{', '.join(self.words[:-1])} or " if len(self.words) > 1 else ""
        return f"{self.key}={head}{self.words[-1]}"


@dataclass(frozen=True)
class Condition:
    """Terms that must all hold."""

    terms: tuple[Term, ...]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether every term holds, for a function that looks up a key."""
        return all(term.holds(value_of(term.key)) for term in self.terms)

    def __str__(self) -> str:
        return " and ".join(map(str, self.terms))


def condition(text: str) -> Condition:
    """Return the condition that `text` spells.

    Raises:
        ValueError: `text` is no condition.
    """
    return Condition(tuple(_term(part) for part in text.split(" and ")))


def _term(text: str) -> Term:
    match = _TERM.match(text)
    if match is None:
        raise ValueError(f"no condition on a key: {text!r}")
    words = tuple(match["words"].split("|")) if match["words"] else ()
    return Term(match["key"], words, int(match["above"]) if match["above"] else None)


def _spelled(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
