"""A run that is killed after a local checkpoint, and that continues from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_restarted_runs import RUN, restarts, result
from tests.support.commands import mtrain

pytestmark = pytest.mark.e2e

# Saved in the run folder after steps 4 and 6, and locally after steps 2, 3 and 5
LOCAL = (*RUN, "checkpoint.save_interval=4", "checkpoint.local_interval=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of a run without faults and without local checkpoints."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*RUN, "checkpoint.save_interval=4", cwd=home)
    assert done.returncode == 0, done.stderr
    return result(home / "runs/run")


@pytest.mark.full
@pytest.mark.parametrize("goes_on", ["false", "true"], ids=["waits", "goes on"])
def test_local_checkpoint_restart_ends_bitwise(
    goes_on: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = (*LOCAL, "checkpoint.local_dir=local", f"checkpoint.async_save={goes_on}")
    done = mtrain(*words, "--restarts", "1", "--inject", "kill@4:1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (noted,) = restarts(tmp_path / "runs/run")
    assert "/local/run-" in noted["checkpoint"]
    assert noted["steps_lost"] <= 2
    assert "continuing from local step_0000000" in done.stdout
    # A slow disk may leave the second attempt no time for one of its own.
    assert 1 <= done.stdout.count("first local checkpoint") <= 2
    assert result(tmp_path / "runs/run") == undisturbed
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.full
def test_local_checkpoint_resume_of_stopped_and_killed_runs(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = (*LOCAL, "checkpoint.local_dir=local", "checkpoint.async_save=false")
    killed = mtrain(*words, "--inject", "kill@4:1", cwd=tmp_path)
    assert killed.returncode == 5
    assert "resume with checkpoint.resume=latest" in killed.stderr
    done = mtrain("resume", "runs/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step_00000003: step 3" in done.stdout
    assert result(tmp_path / "runs/run") == undisturbed
    plan = json.loads((tmp_path / "runs/run/plan.json").read_text())
    assert "/local/run-" in plan["resumed_from"]
    assert list((tmp_path / "local").iterdir()) == []
