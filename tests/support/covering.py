"""Choice of the cases that `make test` runs; `make test-all` runs the others."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Part:
    """One of several parts of a list of cases; together they have each case once."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read K/N. Raises `ArgumentTypeError` unless K is from 1 to N."""
        part, _, parts = (int(word) if word.isdigit() else 0 for word in text.partition("/"))
        if not 1 <= part <= parts:
            raise ArgumentTypeError(f"{text}: a part is K/N with K from 1 to N")
        return cls(part, parts)

    def has(self, index: int) -> bool:
        """Return whether the case at an index, or of a hash, belongs to this part."""
        return index % self.parts == self.number - 1


EVERY_CASE = Part(1, 1)


def some(table: Iterable[str], always: Iterable[str], engine: Iterable[str] = ()) -> list[Any]:
    """Return the names of a table as parameters: marked `engine` if in `engine`, and `full` if in
    neither list.
    """
    names = list(table)
    marks: dict[str, Any] = dict.fromkeys(names, pytest.mark.full)
    marks |= dict.fromkeys(engine, pytest.mark.engine)
    marks |= dict.fromkeys(always, ())
    assert len(marks) == len(names), f"no such cases: {sorted(marks.keys() - set(names))}"
    return [pytest.param(name, id=name, marks=marks[name]) for name in names]


def some_recipes(names: Iterable[str]) -> list[Any]:
    """Return the names of recipes as parameters, `full` except for the first of each folder."""
    first: dict[str, str] = {}
    for name in sorted(names):
        first.setdefault(name.partition("/")[0], name)
    return some(sorted(names), first.values())


def cover(features: Sequence[frozenset[Hashable]]) -> list[int]:
    """Return indices of cases that together have every feature, adding the case with most missing
    features first.
    """
    missing: set[Hashable] = set().union(*features)
    chosen: list[int] = []
    while missing:
        chosen.append(max(range(len(features)), key=lambda i: len(features[i] & missing)))
        missing -= features[chosen[-1]]
    for index in list(chosen):
        others = [features[i] for i in chosen if i != index]
        if others and features[index] <= frozenset[Hashable]().union(*others):
            chosen.remove(index)
    return sorted(chosen)
