"""Faults of the environment: the run ends with 3, says what is wrong and what to do, and starts
nothing.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.errors import BadEnvironment
from tests.support.commands import SMALL, command, environment
from tests.support.launched import Launched, mtrain
from tests.support.patience import patient

WORDS = (*SMALL, "cluster=cpu", "parallel=tp2", "trainer.train_iters=1", "log.name=run")


def few_files() -> None:
    """Let this process open few more files than it has open: a fork inherits those of the tests."""
    # No more than the last number, because a limit counts from 0 and not what is open.
    number = max(map(int, os.listdir("/proc/self/fd"))) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


CASES: dict[str, tuple[dict[str, str], Callable[[], None] | None, str]] = {
    "interface": (
        {"GLOO_SOCKET_IFNAME": "bogus0"},
        None,
        "GLOO_SOCKET_IFNAME names the interface 'bogus0'",
    ),
    "debug": ({"TORCH_DISTRIBUTED_DEBUG": "bogus"}, None, "TORCH_DISTRIBUTED_DEBUG='bogus'"),
    "files": ({}, few_files, "ulimit -n 1024"),
    "transport": ({"GLOO_DEVICE_TRANSPORT": "pigeon"}, None, "GLOO_DEVICE_TRANSPORT='pigeon'"),
    "recorder": ({"TORCH_FR_BUFFER_SIZE": "many"}, None, "TORCH_FR_BUFFER_SIZE='many'"),
    "attention": ({"NVTE_FLASH_ATTN": "0"}, None, "NVTE_FLASH_ATTN='0'"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_faulty_environment_ends_run_before_start(name: str, tmp_path: Path) -> None:
    variables, patch, said = CASES[name]
    run = Launched(*WORDS, cwd=tmp_path, environment=variables, patch=patch)
    assert run.wait() == BadEnvironment.exit_code, run.said
    assert said in run.said
    assert not any(
        word in run.said
        for word in ("Traceback", "enforce", "unexpected", "checkpoint.resume", "run folder")
    )
    assert not (tmp_path / "runs").exists()


def test_faulty_environment_small_address_space_is_reported(tmp_path: Path) -> None:
    words = ["bash", "-c", 'ulimit -v 1000000 && exec "$@"', "-", *command(*WORDS)]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=patient(120)
    )
    assert done.returncode == BadEnvironment.exit_code, done.stderr
    assert "ulimit -v unlimited" in done.stderr
    assert "Traceback" not in done.stderr


def test_faulty_environment_show_prints_rank_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    shown = mtrain("show", *WORDS, cwd=tmp_path).stdout.partition("# environment of each rank:\n")[
        2
    ]
    assert [line.split()[1].split("=")[0] for line in shown.splitlines()] == [
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "TORCH_CPP_LOG_LEVEL",
        "GLOO_SOCKET_IFNAME",
    ]
    assert "MKL_NUM_THREADS=7" in shown
    assert "set by you; " in shown
    whole, bare = (
        mtrain("show", *more, *WORDS, cwd=tmp_path).stdout
        for more in (("--json",), ("--resolved",))
    )
    assert '"MKL_NUM_THREADS": {"value": "7"' in whole
    assert "MKL_NUM_THREADS" not in bare


@pytest.mark.parametrize(("verb", "code"), [((), 3), (("check",), 2)], ids=["train", "check"])
def test_faulty_environment_unwritable_runs_folder_is_reported(
    verb: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    run = Launched(*verb, *WORDS, "log.runs_dir=/proc/runs", cwd=tmp_path)
    assert run.wait() == code, run.said
    assert "error[MT431]" in run.said
    assert "/proc cannot be written: it is the kernel's" in run.said
