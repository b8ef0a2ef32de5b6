"""A run on GPUs that are not here, or not shown, ends with exit code 3 before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.commands import ROOT, SMALL, command, environment
from tests.support.covering import some
from tests.support.nvml import site
from tests.support.patience import patient

pytestmark = pytest.mark.e2e
VERBS = {"": 3, "prove": 3, "rehearse": 3, "check": 2, "plan": 2, "show": 2}
"""Verb -> the exit code of a configuration that names GPUs, where there are none and it does not
say how many.
"""


def ended(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and require that it leaves nothing behind."""
    done = subprocess.run(
        command(*words),
        env={**environment(), **variables},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert not (home / "runs").exists()
    return done


@pytest.mark.sampled(3)
@pytest.mark.parametrize("verb", some(VERBS, ["", "prove", "check"]))
def test_no_devices_refuse_only_runs(verb: str, tmp_path: Path) -> None:
    words = [*([verb] if verb else []), *SMALL, "cluster.device=cuda", "parallel=single"]
    done = ended(tmp_path, *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == VERBS[verb], done.stdout + done.stderr
    code = "[MT051] needs 1 GPU on this machine; here: 0" if VERBS[verb] == 3 else "error[MT113]"
    assert code in done.stdout + done.stderr
    assert ("fix: " if VERBS[verb] == 3 else " Use ") in done.stdout + done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize("visible", ["", "0,0", "GPU-none", "0,GPU-none"])
def test_no_devices_bad_variable_is_refused_first(visible: str, tmp_path: Path) -> None:
    paths = f"{site(tmp_path / 'site')}:{ROOT}:{ROOT / 'src'}:{ROOT / 'kernels'}"
    variables = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": visible}
    done = ended(tmp_path, *SMALL, "cluster.device=cuda", "parallel=single", **variables)
    assert done.returncode == 3, done.stderr
    assert "[MT052] CUDA_VISIBLE_DEVICES" in done.stderr
    assert (
        "fix: unset CUDA_VISIBLE_DEVICES, or list each GPU once: CUDA_VISIBLE_DEVICES=0,1"
        in done.stderr
    )
