"""Checkpoints through s3fs in a server of S3 on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import patient

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".moto-5.2"


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="moto and s3fs: make .moto-5.2"),
]


def told(*words: str, packages: Path = PACKAGES) -> dict[str, Any]:
    """Return what a module of `tests.support` found with `packages` in its path."""
    modules = [str(packages), *(path for path in sys.path if path), str(ROOT)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=kept | {"PYTHONPATH": os.pathsep.join(modules), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_checkpoint_s3_commits_once_and_reads_back() -> None:
    found = told("tests.support.loopback_store", "16")
    assert found["no credentials"].startswith("BadEnvironment")
    assert "NoCredentialsError" in found["no credentials"]
    assert "there is no such bucket" in found["no bucket"]
    files, nbytes, _ = found["sent"]
    assert (files, found["sent again"], found["created twice"]) == (4, 0, False)
    assert nbytes > 16 << 20
    assert (found["damage"], found["newest without manifest"]) == ([], False)


def test_checkpoint_s3_run_continues_on_another_machine() -> None:
    found = told("tests.support.loopback_runs")
    for name, why in (("no credentials", "NoCredentialsError"), ("no bucket", "no such bucket")):
        code, said = found[name]
        assert code == 3, said
        assert "error[MT489] checkpoint.remote=s3://" in said
        assert why in said
        assert "run folder" not in said
    assert found["first"][0] == 0, found["first"][1]
    assert found["secrets"] == []
    assert "canary" not in found["first"][1]
    code, said = found["again"]
    assert code == 0, said
    assert "reading s3://bucket/run/step_00000006 where it is" in said
    code, said, seconds = found["verdict"]
    verdict = json.loads(said)
    assert (code, verdict["outcome"], verdict["bitwise"]) == (0, "same", True)
    assert verdict["checkpoint"] == "s3://bucket/run/step_00000008"
    assert seconds < patient(2.0), "with the start of the interpreter"
    code, said, _ = found["evaluate"]
    assert code == 0, said
    assert found["there"] == ["step_00000006", "step_00000008"]
    code, said = found["altered"]
    assert code == 4, said
    assert "rank_00000.safetensors" in said
    codes = [one[0] for one in found["killed"]]
    # The last point lies behind the last request.
    assert set(codes[:-1]) == {-9}
    assert codes[-1] == 0
    for code, complete, whole, after, damage in found["killed"]:
        assert complete in ([1], [1, 2], [2]), code
        assert (whole, after, damage) == (True, [2], [])
