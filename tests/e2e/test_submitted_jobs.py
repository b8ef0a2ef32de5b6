"""`render` and `submit` in processes of their own, and a batch job that trains, is stopped, and
continues after its requeue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import SMALL, environment, mtrain
from tests.support.launched import light

pytestmark = pytest.mark.e2e

# The steps of SLURM run on this machine.
STUBS = {
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        echo $$ > step
        export SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0
        exec "$@"
    """,
    "squeue": "case $* in *--steps*) echo 4711.0;; *) echo RUNNING;; esac",
    "scancel": 'kill -TERM "$(cat step)"',
    "scontrol": 'echo "$@" > requeued',
}


def test_submitted_jobs_render_prints_the_digest(tmp_path: Path) -> None:
    words = ("launch=slurm", "recipe=llama3/70b_h100x64")
    done = light("render", *words, "--out", "job.sbatch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    digest = done.stdout.split()[-1]
    assert f"# digest {digest}" in (tmp_path / "job.sbatch").read_text()
    assert light("check", words[1], cwd=tmp_path).stdout.split()[-1] == digest


def test_submitted_jobs_missing_program_exits_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = light("submit", "launch=slurm", "model=llama_tiny", cwd=tmp_path)
    assert done.returncode == 3
    assert "sbatch is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def stopped_after(step: int, folder: Path, environment: dict[str, str]) -> str:
    """Run the batch script until a step, send TERM as SLURM does, and return its output."""
    log = folder / f"output-{step}"
    with log.open("w") as output:
        batch = subprocess.Popen(
            ["bash", "job.sbatch"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    deadline = time.monotonic() + 120
    while f"step {step:>3}/" not in log.read_text():
        assert batch.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(60) == 75, log.read_text()
    return log.read_text()


@pytest.mark.full
def test_submitted_jobs_requeue_continues_the_run(tmp_path: Path) -> None:
    words = ["launch=slurm", "parallel=single", "trainer.train_iters=900", "log.progress=plain"]
    program = f"launch.command=[{sys.executable},-m,mtrain]"
    done = mtrain("render", *words, *SMALL, program, "--out", "job.sbatch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    first = {**environment(), "PATH": path, "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}
    stopped_after(2, tmp_path, first)
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    saved = max((tmp_path / "runs").glob("*/checkpoints/step_*"))
    step = int(saved.name.partition("_")[2]) + 1
    again = stopped_after(step, tmp_path, {**first, "SLURM_RESTART_COUNT": "1"})
    assert f"{saved.name}: step {step - 1}" in again
    assert len([folder for folder in (tmp_path / "runs").iterdir() if folder.is_dir()]) == 1
