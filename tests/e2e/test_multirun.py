"""A sweep as a user starts it: every run in its folder, one table, and a stop that ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import SMALL, environment, latest, metrics, wait_for
from tests.support.launched import Launched, mtrain
from tests.support.patience import patient

pytestmark = pytest.mark.e2e
TINY = (*SMALL, "parallel=single", "checkpoint=off", "log=quiet")


def test_multirun_failing_run_sets_exit_code_only(tmp_path: Path) -> None:
    words = [
        "trainer.train_iters=3",
        "trainer.eval_iters=1",
        "optim.lr=1e-3,1e-2",
        "parallel=single,tp3",
    ]
    done = mtrain("-m", *TINY, *words, "log.name=s", "--json", cwd=tmp_path, timeout_s=240)
    rows = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert done.returncode == 2
    assert [row["code"] for row in rows] == [0, 2, 0, 2]
    assert [row["name"] for row in rows] == ["s-0", "s-1", "s-2", "s-3"]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["s-0", "s-2", "s.sweep.txt"]
    assert "table: runs/s.sweep.txt" in done.stderr
    table = (tmp_path / "runs/s.sweep.txt").read_text().splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["s-0", "s-1", "s-2", "s-3"]
    assert table[-1] == "4 of 4 runs, 2 failed"
    for row in (rows[0], rows[2]):
        lines = metrics(tmp_path / "runs" / row["name"])
        assert row["loss"] == next(line["loss"] for line in reversed(lines) if "loss" in line)
        assert row["validation"] == lines[-1]["valid_loss"]
        assert row["tokens_per_s"] > 0
    assert rows[0]["loss"] != rows[2]["loss"]
    assert "MT101" in done.stderr


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_multirun_stop_ends_run_and_sweep(name: str, tmp_path: Path) -> None:
    words = ["trainer.train_iters=100000", "trainer.seed=1,2", "log.name=s", "log.runs_dir=runs"]
    sweep = Launched("-m", *SMALL, "parallel=single", "log=quiet", *words, cwd=tmp_path)
    wait_for(lambda: len(metrics(tmp_path / "runs/s-0")) > 3, 90)
    os.kill(sweep.pid, signal.Signals[name])
    assert sweep.wait(60) == 75, sweep.said
    assert "1 of 2 runs" in sweep.said
    assert not (tmp_path / "runs/s-1").exists()
    assert list((tmp_path / "runs/s-0/checkpoints").glob("step_*")), "the run saved before it ended"


@pytest.mark.full
def test_multirun_imports_torch_once(tmp_path: Path) -> None:
    """Record each process that imports torch with an import hook; runs are forked from the one that
    has it.
    """
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            open('imports.txt', 'a').write(f'{os.getpid()}\\n')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from mtrain.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = [
        "-m",
        *latest(
            *TINY, "trainer.train_iters=1", "trainer.eval_iters=0", "trainer.seed=1,2", "log.name=s"
        ),
    ]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "imports.txt").read_text().splitlines()) == 1
    assert all(metrics(tmp_path / "runs" / name) for name in ("s-0", "s-1"))
