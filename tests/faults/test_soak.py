"""The soak finds what it looks for, and a run passes it."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.faults.promises import Record, measured
from tests.faults.soak import Soak, shared_names, unowned

MINUTES = 3


@pytest.mark.full
@pytest.mark.timeout(900)
def test_soak_with_a_kill_per_minute_loses_nothing(tmp_path: Path, record_property: Record) -> None:
    soaked = Soak(tmp_path, MINUTES, 0, print).run()
    assert soaked.problems == []
    assert len(soaked.kills) >= MINUTES
    for values in soaked.measured:
        measured(record_property, **values)


def test_soak_left_process_and_memory_are_found(tmp_path: Path) -> None:
    soak = Soak(tmp_path, MINUTES, 0, print)
    before = shared_names()
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    memory = shared_memory.SharedMemory(create=True, size=8)
    name = f"/dev/shm/{memory.name}"
    try:
        assert soak.mine() == []
        soak.sessions.append(left.pid)
        assert [process.pid for process in soak.mine()] == [left.pid]
        assert name in shared_names() - before
        assert unowned({name}) == set(), "this process has mapped it"
        memory.close()
        assert unowned({name}) == {name}
    finally:
        left.kill()
        left.wait()
        memory.unlink()
    assert soak.mine() == []
