"""The command where something of its place is missing: room, an installation, a driver that is new
enough.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SMALL, command, environment
from tests.support.nvml import site
from tests.support.patience import patient

pytestmark = pytest.mark.e2e
UNINSTALLED = """
from importlib import metadata

found = metadata.Distribution.from_name.__func__


def from_name(cls, name):
    if name == "mtrain":
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)


metadata.Distribution.from_name = classmethod(from_name)
"""


def test_places_full_stdout_is_reported() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("check"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=patient(60)
        )
    assert done.returncode == 3
    assert (
        done.stderr
        == "standard output: No space left on device\n  fix: free some space, or use another"
        " place\n"
    )


def test_places_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "--version"],
        env={**environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "mtrain"), done.stderr


@pytest.mark.full
def test_places_source_tree_trains_uninstalled(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(UNINSTALLED)
    paths = f"{tmp_path / 'site'}:{ROOT / 'src'}:{ROOT / 'kernels'}"
    words = [
        "parallel=single",
        "cluster=cpu",
        "kernels.cpu_matmul=blas",
        "checkpoint.save_final=false",
    ]
    done = subprocess.run(
        command(*SMALL, *words, "trainer.train_iters=1", "log.name=bare"),
        env={**environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "runs/bare/metrics.jsonl").read_text().splitlines()) == 1


def test_places_unusable_gpus_are_refused_first(tmp_path: Path) -> None:
    paths = f"{site(tmp_path / 'site')}:{ROOT}:{ROOT / 'src'}:{ROOT / 'kernels'}"
    done = subprocess.run(
        command(*SMALL, "parallel=single", "log.name=crowded"),
        env={
            **environment(),
            "PYTHONPATH": paths,
            "FAKE_CUDA": "11040",
            "FAKE_USED_MIB": "143770",
            "CUDA_VISIBLE_DEVICES": "1,7",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 3, done.stderr
    for piece in (
        "[MT052] CUDA_VISIBLE_DEVICES=1,7: 7 is no GPU",
        "[MT053] GPU 0 (NVIDIA H200) has 1.0 MiB of 140.4",
    ):
        assert piece in done.stderr
    assert "[MT054]" in done.stderr or "[MT055]" in done.stderr, (
        "torch of this machine is newer, or for no CUDA"
    )
    assert not (tmp_path / "runs").exists()
