"""Checkpoints through s3fs in a server of S3 on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".moto-5.2"


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="moto and s3fs: make .moto-5.2")
def test_checkpoint_s3_commits_once_and_reads_back() -> None:
    modules = [str(PACKAGES), *(path for path in sys.path if path), str(ROOT)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.loopback_store", "16"],
        env=kept | {"PYTHONPATH": os.pathsep.join(modules), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["no credentials"].startswith("BadEnvironment")
    assert "NoCredentialsError" in found["no credentials"]
    assert "there is no such bucket" in found["no bucket"]
    files, nbytes, _ = found["sent"]
    assert (files, found["sent again"], found["created twice"]) == (4, 0, False)
    assert nbytes > 16 << 20
    assert (found["damage"], found["newest without manifest"]) == ([], False)
