"""The fault matrix is whole, and every test that it names exists."""

from __future__ import annotations

from argparse import ArgumentTypeError
from itertools import chain

import pytest

from tests.faults.matrix import PARTS, beyond_rows, gone, gpu_only, numbers_of, rows, third


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


def test_faults_rows_are_chosen_by_number() -> None:
    assert numbers_of("1,2,5-9") == [1, 2, 5, 6, 7, 8, 9]
    for text in ("", "0", "41", "a", "1-x"):
        with pytest.raises(ArgumentTypeError):
            numbers_of(text)
