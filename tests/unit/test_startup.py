"""Seconds of a start by part."""

from __future__ import annotations

import time

import pytest

from mtrain import startup


def test_startup_parts_add_up_over_processes() -> None:
    launcher = startup.Startup(10.0, [("imports", 12.0), ("data", 12.5)])
    rank = startup.Startup.of({startup.VARIABLE: launcher.passed_on()})
    assert rank is not None
    rank.ends += [("imports", 13.5), ("first step", 20.0)]
    parts = rank.seconds()
    assert parts == {"imports": 3.0, "data": 0.5, "first step": 6.5}
    assert sum(parts.values()) == rank.total() == 10.0


@pytest.mark.parametrize("text", [None, "", "[", '["x", []]', "[1.0, [[2]]]"])
def test_startup_unreadable_variable_is_ignored(text: str | None) -> None:
    assert startup.Startup.of({} if text is None else {startup.VARIABLE: text}) is None


def test_startup_begins_with_the_process() -> None:
    # the interpreter of this test has imported torch, and is not a day old
    assert 0.05 < time.monotonic() - startup.process_began() < 86400


def test_startup_line_leaves_short_parts_out() -> None:
    known = startup.Startup(10.0, [("imports", 14.0), ("joining", 14.02)])
    assert known.line(3) == "start-up: 4.0s: imports 4.0s, with 3 kernels compiled"
    text = known.line(0, ahead=2)
    assert text == "start-up: 4.0s: imports 4.0s, 2 kernels compiled ahead"
