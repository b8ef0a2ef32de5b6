"""The page of codes has a row for each code, with its cause and its fix."""

from __future__ import annotations

import re

from mtrain.config.messages.codes import codes, codes_page

ROW = re.compile(r"^\| `(MT\d+)`( \(warning\))? \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def test_codes_page_has_each_code_once_in_order() -> None:
    assert [row[0] for row in ROW.findall(codes_page())] == list(codes())


def test_codes_page_rows_have_cause_and_fix() -> None:
    for code, _, cause, fix, _ in ROW.findall(codes_page()):
        assert cause, code
        assert fix, code


def test_codes_page_marks_warnings() -> None:
    marked = {row[0] for row in ROW.findall(codes_page()) if row[1]}
    assert marked == {code for code, known in codes().items() if known.severity == "warning"}
