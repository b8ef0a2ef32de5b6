"""The rows of the fault matrix, and the search for tests that are gone."""

from __future__ import annotations

import ast
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mtrain.errors import own_yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("rows.yaml")
PARTS = 3
"""Parts of the matrix, of which a CI run tests one."""


@dataclass(frozen=True)
class Row:
    """A fault, its expected outcome, and the tests that show it."""

    row: int
    fault: str
    expected: str
    tests: tuple[str, ...] = ()
    """Node ids; a function without brackets stands for all of its cases."""
    lacks: str = ""
    """The part of the outcome that no test shows."""
    why_not: str = ""
    """The reason why the row has no tests."""

    @property
    def state(self) -> str:
        """Return how much of the outcome the tests check."""
        if not self.tests:
            return "not tested"
        return "tested in part" if self.lacks else "tested"


def rows() -> list[Row]:
    """Return the rows of the matrix."""
    found = [Row(**one) for one in own_yaml(FILE)["rows"]]
    return [replace(row, tests=tuple(row.tests)) for row in found]


def gpu_only() -> list[str]:
    """Return the faults that only a GPU can show."""
    return list(own_yaml(FILE)["gpu"])


def beyond_rows() -> list[str]:
    """Return the tests of promises that no row covers; they run with the whole matrix only."""
    return list(own_yaml(FILE)["promises"])


def in_brief(row: Row) -> Row:
    """Return a row without its longest tests, or with a few of their cases: see `brief` in the
    file.
    """
    instead = own_yaml(FILE)["brief"]
    return replace(row, tests=tuple(one for test in row.tests for one in instead.get(test, [test])))


def third(part: int) -> list[int]:
    """Return the numbers of the rows in part 1, 2 or 3.

    Parts are contiguous, because neighbours share tests.
    """
    numbers = [row.row for row in rows()]
    size = len(numbers)
    return numbers[size * (part - 1) // PARTS : size * part // PARTS]


def numbers_of(text: str) -> list[int]:
    """Return the numbers of a text such as `1,2,5-9`. Raises `ArgumentTypeError` for others."""
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ArgumentTypeError(f"{word} is no row; write numbers and ranges, such as 1,2,5-9")
        found += range(int(first), int(last or first) + 1)
    known = {row.row for row in rows()}
    if unknown := [number for number in found if number not in known]:
        raise ArgumentTypeError(f"there is no row {unknown[0]}; rows are 1 to {len(known)}")
    return found


@cache
def _functions(path: Path) -> frozenset[str]:
    """Return the names of the functions at the top of a file; none if there is no file."""
    if not path.is_file():
        return frozenset()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def gone(tests: Iterable[str]) -> list[str]:
    """Return the node ids whose function is in no file of tests. Cases in brackets are not read."""
    return [test for test in tests if not _exists(test)]


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    return name.partition("[")[0] in _functions(ROOT / path)
