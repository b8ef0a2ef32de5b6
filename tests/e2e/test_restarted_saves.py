"""Runs that lose a process at a fixed moment of a save, and that continue by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_restarted_runs import RUN, restarts, result
from tests.faults.promises import Record, differing, measured
from tests.support import save_moments
from tests.support.launched import Launched, mtrain

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of a run without faults."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*RUN, cwd=home)
    assert done.returncode == 0, done.stderr
    return result(home / "runs/run")


def at(moment: str, fault: str = save_moments.KILL) -> Callable[[], None]:
    """Return a patch for a fault in the save of step 4."""
    return lambda: save_moments.use(moment, 4, fault)


def check(home: Path, undisturbed: dict[str, Any], begun: int, record: Record) -> None:
    """Check that a run continued from the checkpoint of a step to the end, and left no draft."""
    (noted,) = restarts(home)
    assert noted["checkpoint"] == f"checkpoints/step_{begun:08d}"
    found = result(home)
    measured(record, kill_points=1, intervals_lost=(4 - begun) / 2)
    measured(record, states=1, differing=differing(found, undisturbed))
    assert found == undisturbed
    left = [path.name for path in (home / "checkpoints").iterdir()]
    assert all(name.startswith("step_") for name in left), left


@pytest.mark.full
@pytest.mark.parametrize("saving", ["waits", "goes on"])
@pytest.mark.parametrize("moment", save_moments.MOMENTS)
def test_restarted_save_killed_at_a_moment_ends_bitwise(
    moment: str,
    saving: str,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    record_property: Record,
) -> None:
    words = [*RUN, f"checkpoint.async_save={'true' if saving == 'goes on' else 'false'}"]
    run = Launched(*words, "--restarts", "1", cwd=tmp_path, patch=at(moment))
    assert run.wait() == 0, run.said
    assert (tmp_path / "moment").exists(), "the moment came"
    begun = 4 if moment == "after the rename" else 2
    check(tmp_path / "runs/run", undisturbed, begun, record_property)


@pytest.mark.full
def test_restarted_save_killed_rank_while_writing_ends_bitwise(
    undisturbed: dict[str, Any], tmp_path: Path, record_property: Record
) -> None:
    words = [*RUN, "checkpoint.async_save=true", "--restarts", "1"]
    patch = at("before the rename", save_moments.RANK)
    run = Launched(*words, cwd=tmp_path, patch=patch)
    assert run.wait() == 0, run.said
    assert "rank 0 was ended by SIGKILL (step " in run.said
    # Training went on while the checkpoint of step 4 lacked its name.
    assert restarts(tmp_path / "runs/run")[0]["step"] > 4
    check(tmp_path / "runs/run", undisturbed, 2, record_property)
