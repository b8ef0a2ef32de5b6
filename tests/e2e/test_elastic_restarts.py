"""One command that a launcher gives again and again: it begins a run, and goes on with it after
each restart.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, SMALL, environment, latest, metrics, wait_for

WORDS = (*SMALL, "cluster=cpu", "trainer.train_iters=40", "checkpoint.save_interval=2")


def _ranks(agent: int) -> list[psutil.Process]:
    """Return the ranks that torchrun has started, in their order."""
    return sorted(psutil.Process(agent).children(), key=lambda child: child.pid)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "name", "number"),
    [
        (1, (), signal.SIGKILL),
        pytest.param(2, (), signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(2, ("log.name=a",), signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(2, (), signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_elastic_restart_replaces_stopped_rank(
    ranks: int, name: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    words = latest(*WORDS, f"parallel=tp{ranks}", *name)
    command = [*program, "--max-restarts", "1", str(ROOT / "launch.py"), *words]
    output = tmp_path / "output"
    with output.open("w") as file:
        agent = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: bool(list(tmp_path.glob("runs/*/checkpoints/step_*/manifest.json"))), 120)
        os.kill(_ranks(agent.pid)[-1].pid, number)
        assert agent.wait(120) == 0, output.read_text()[-4000:]
    finally:
        for child in (
            psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else []
        ):
            child.kill()
        agent.kill()
    assert "resumed from" in output.read_text()
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1, "the restart went on with the run"
    assert [line["step"] for line in metrics(runs[0])] == list(range(1, 41))
