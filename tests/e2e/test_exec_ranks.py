"""Ranks on a device that does not survive a fork: they are executed, and the launcher makes no call
of the device's driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SMALL, latest
from tests.support.patience import patient

DRIVER = ROOT / "tests/support/driver"
ON_GPUS = (
    "cluster.device=cuda",
    "precision=fp32",
    "kernels=reference",
    "trainer.train_iters=2",
    "log.name=run",
)
ALONE = ("parallel=single", "parallel.ranks=1", "cluster.devices_per_node=1")
"""One rank, whatever devices are here."""


class OnDriver:
    """The command line on a machine whose driver is the stand-in of `tests/support/driver`."""

    def __init__(self, home: Path, gpus: int = 2) -> None:
        self.home = home
        self.log = home / "driver.log"
        self.gpus = gpus

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command; returns what it said.

        No process of it may use the driver but a rank of its own.
        """
        self.log.write_text("")
        path = os.pathsep.join([str(DRIVER), str(ROOT / "src"), str(ROOT / "kernels"), str(ROOT)])
        environment = {
            **{
                k: v
                for k, v in os.environ.items()
                if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
            },
            "PYTHONPATH": path,
            "DRIVER_LOG": str(self.log),
            "DRIVER_GPUS": str(self.gpus),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(ROOT / "launch.py"), *latest(*words)]
        with subprocess.Popen(
            command,
            cwd=self.home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said, _ = process.communicate(timeout=patient(240))
        assert process.returncode == code, said
        self.launcher = process.pid
        return said

    def users(self) -> set[int]:
        """Return the processes that called the driver."""
        return {int(line.split()[0]) for line in self.log.read_text().splitlines()}

    def assert_ranks_alone_used_it(self, ranks: int) -> None:
        """Assert that as many processes as ranks called the driver, none of which had refused to
        work, and not the launcher.
        """
        assert self.launcher not in self.users()
        assert len(self.users()) == ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> OnDriver:
    """Train on the stand-in, on a corpus with a tokenizer that the launcher trains."""
    command = OnDriver(tmp_path_factory.mktemp("driver"))
    said = command(
        *SMALL, *ON_GPUS, *ALONE, "data=stdlib", "model.vocab_size=4096", "data.limit_mib=1"
    )
    assert "step 2/2" in said
    command.assert_ranks_alone_used_it(1)
    return command


def test_exec_ranks_train_calls_no_driver_before_ranks(tmp_path: Path) -> None:
    command = OnDriver(tmp_path)
    said = command(*SMALL, *ON_GPUS, *ALONE)
    assert "step 2/2" in said
    command.assert_ranks_alone_used_it(1)


@pytest.mark.full
def test_exec_ranks_resume_calls_no_driver(trained: OnDriver) -> None:
    said = trained(
        "resume", "runs/run", "trainer.train_iters=3", "checkpoint.accept_changes=true", *ALONE
    )
    assert "resumed from" in said
    assert "step 3/3" in said
    trained.assert_ranks_alone_used_it(1)


@pytest.mark.full
def test_exec_ranks_generate_calls_no_driver(trained: OnDriver) -> None:
    said = trained("generate", "runs/run", "tokens=2", *ALONE)
    assert "2 tokens in" in said
    trained.assert_ranks_alone_used_it(1)


@pytest.mark.full  # the entrance of `generate`
def test_exec_ranks_evaluate_calls_no_driver(trained: OnDriver) -> None:
    said = trained("evaluate", "runs/run", "limit=2", *ALONE)
    assert "nats per token" in said
    trained.assert_ranks_alone_used_it(1)


@pytest.mark.full
def test_exec_ranks_prove_runs_on_local_devices(tmp_path: Path) -> None:
    command = OnDriver(tmp_path)
    said = command("prove", *SMALL, *ON_GPUS, "parallel=tp2")
    assert "proven" in said
    assert "2 cuda ranks" in said
    command.assert_ranks_alone_used_it(3)  # two of the layout, and the one that it is compared with


@pytest.mark.full
def test_exec_ranks_rehearse_runs_on_local_devices(tmp_path: Path) -> None:
    command = OnDriver(tmp_path)
    said = command("rehearse", *SMALL, *ON_GPUS, *ALONE)
    assert "rehearsed" in said
    assert "1 cuda ranks" in said
    command.assert_ranks_alone_used_it(2)  # the whole run and the resumed one
