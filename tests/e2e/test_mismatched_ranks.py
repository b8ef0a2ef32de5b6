"""Ranks started by hand, as any launcher would start them: each ends soon, and says what is wrong
with the others.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import SMALL, command, environment
from tests.support.launched import as_rank, free_port
from tests.support.patience import patient

pytestmark = pytest.mark.e2e
WORDS = (*SMALL, "cluster=cpu", "parallel=dp", "log.name=run")


def started(rank: int, port: int, *words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*WORDS, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**environment(), **as_rank(rank, 2, port)},
    )


@pytest.mark.full  # tests/distributed/test_joining.py has it without the imports of a process
def test_mismatched_ranks_absent_is_named_after_five_seconds(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = started(0, free_port(), "trainer.join_timeout_s=5", cwd=tmp_path)
    _, said = process.communicate(timeout=patient(120))
    assert process.returncode == 3
    assert said.startswith("rank 0: rank 1 of 2 did not arrive within 5 s; arrived: 0 on ")
    assert said.count("\n") == 2
    assert time.monotonic() - begun > 5


@pytest.mark.full
def test_mismatched_ranks_differing_key_ends_before_imports(
    tmp_path: Path,
) -> None:
    port = free_port()
    processes = [started(0, port, cwd=tmp_path), started(1, port, "trainer.seed=7", cwd=tmp_path)]
    for rank, process in enumerate(processes):
        out, said = process.communicate(timeout=patient(120))
        assert (process.returncode, out) == (3, "")
        head, line, _ = said.split("\n", 2)
        assert head == f"rank {rank}: ranks [1] differ from rank 0 in version or configuration:"
        assert line.startswith("  trainer.seed: 7 on rank 1 (")
        assert said.count("\n") == 2, said
    assert not (tmp_path / "runs").exists()
