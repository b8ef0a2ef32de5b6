"""The fault matrix is whole, and every test that it names exists."""

from __future__ import annotations

from argparse import ArgumentTypeError
from itertools import chain

import pytest

from tests.faults.matrix import (
    PARTS,
    beyond_rows,
    gone,
    gpu_only,
    in_brief,
    numbers_of,
    rows,
    third,
)
from tests.faults.promises import report


def test_faults_matrix_has_forty_whole_rows() -> None:
    assert [row.row for row in rows()] == list(range(1, 41))
    for row in rows():
        assert row.fault, row
        assert row.expected, row
        assert bool(row.tests) != bool(row.why_not), row
        assert not (row.lacks and row.why_not), row
    assert gpu_only()


def test_faults_named_tests_exist() -> None:
    assert gone(test for row in rows() for test in row.tests) == []
    assert gone(beyond_rows()) == []


def test_faults_renamed_test_is_noticed() -> None:
    here = "tests/faults/test_faults.py::"
    known = [f"{here}test_faults_named_tests_exist", f"{here}test_faults_named_tests_exist[a]"]
    wrong = [f"{here}test_faults_renamed", "tests/unit/no_file.py::test_a", "tests/faults"]
    assert gone([*known, *wrong]) == wrong


def test_faults_thirds_have_each_row_once() -> None:
    parts = [third(part) for part in range(1, PARTS + 1)]
    assert [*chain(*parts)] == [row.row for row in rows()]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_faults_brief_row_has_some_of_its_tests() -> None:
    for row in rows():
        short = in_brief(row)
        assert gone(short.tests) == []
        assert bool(short.tests) == bool(row.tests), row.row
        cases = {test.partition("[")[0] for test in row.tests}
        assert {test.partition("[")[0] for test in short.tests} <= cases
    assert sum(len(in_brief(row).tests) for row in rows()) < sum(len(row.tests) for row in rows())


def test_faults_promise_beyond_its_limit_is_broken() -> None:
    good = {"dead_rank_s": [0.5, 1.0], "kill_points": [20.0, 9.0], "goodput": [0.95]}
    lines, held = report(good)
    assert held
    assert any("kill points: 29" in line for line in lines)
    assert any("the end: 1 s (at most 2; 2 measured)" in line for line in lines)
    assert any("damaged files: not measured" in line for line in lines)
    for key, value in (("misnamed", 1.0), ("goodput", 0.8), ("dead_rank_s", 1e6)):
        lines, held = report(good | {key: [value]})
        assert not held
        assert sum(line.endswith("BROKEN") for line in lines) == 1


def test_faults_rows_are_chosen_by_number() -> None:
    assert numbers_of("1,2,5-9") == [1, 2, 5, 6, 7, 8, 9]
    for text in ("", "0", "41", "a", "1-x"):
        with pytest.raises(ArgumentTypeError):
            numbers_of(text)
