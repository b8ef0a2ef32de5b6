"""Checkpoints through gcsfs in an emulator of Google Cloud Storage on this machine."""

from __future__ import annotations

import pytest

from tests.unit.test_checkpoint_s3 import ROOT, told

PACKAGES = ROOT / ".gcs-2026.7"


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="the emulator and gcsfs: make .gcs-2026.7")
def test_checkpoint_gcs_commits_and_is_read_where_it_is() -> None:
    found = told("tests.support.loopback_gcs", "4", packages=PACKAGES)
    files, nbytes = found["sent"]
    assert (files, found["sent again"], found["steps"]) == (4, 0, [1])
    assert nbytes > 4 << 20
    assert found["damage"] == []
    # run.yaml, the manifest, and the address in place of two shards
    assert found["standing"] == [[], 3]
    name = "gs://bucket/run/step_00000001/rank_00001.safetensors"
    assert found["altered"].startswith(f"{name} is not what was written")
    assert found["newest without manifest"] is False
