"""A run whose machine is lost, and that continues elsewhere from its address."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt.remote.place import Place
from tests.e2e.test_restarted_runs import result
from tests.support.commands import SMALL, wait_for
from tests.support.launched import Launched, mtrain

pytestmark = pytest.mark.e2e

RUN = (*SMALL, "parallel=single", "checkpoint.save_interval=2", "log.name=run")
SIX = (*RUN, "trainer.train_iters=6")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of a run without an address."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*SIX, cwd=home)
    assert done.returncode == 0, done.stderr
    return result(home / "runs/run")


def uploads(home: Path) -> list[tuple[int, str]]:
    lines = (home / "uploads.jsonl").read_text().splitlines()
    return [(line["step"], line["state"]) for line in map(json.loads, lines)]


@pytest.mark.full
def test_remote_run_of_a_lost_machine_ends_bitwise(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/store/run"
    words = (*SIX, f"checkpoint.remote={store}")
    killed = mtrain(*words, "--inject", "kill@6:0", cwd=tmp_path)
    assert killed.returncode == 5
    # The launcher outlives its ranks, and waits for the uploads.
    assert [one.step for one in Place(store).committed()] == [2, 4]
    shutil.rmtree(tmp_path / "runs")
    done = mtrain(*words, "checkpoint.resume=latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"reading {store}/step_00000004 where it is" in done.stdout
    found = result(tmp_path / "runs/run")
    assert (found["shards"], found["state"]) == (undisturbed["shards"], undisturbed["state"])
    assert found["steps"] == undisturbed["steps"][4:]
    assert [one.step for one in Place(store).committed()] == [4, 6]
    assert uploads(tmp_path / "runs/run") == [(6, "uploaded")]
    # Commands read it where it is, too.
    for command in ("checkpoint verify", "checkpoint verdict", "evaluate"):
        looked = mtrain(*command.split(), store, cwd=tmp_path)
        assert looked.returncode == 0, looked.stderr
    assert "the same layout, bitwise" in mtrain("checkpoint", "verdict", store, cwd=tmp_path).stdout
    # Without a word about the address, the folder of the run keeps it.
    more = ("resume", "runs/run", "trainer.train_iters=8", "checkpoint.accept_changes=true")
    assert mtrain(*more, cwd=tmp_path).returncode == 0
    assert [one.step for one in Place(store).committed()] == [6, 8]


@pytest.mark.full
def test_remote_run_stopped_on_request_uploads_its_last_state(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store/run"
    words = (*RUN, "trainer.train_iters=100000", "checkpoint.save_interval=0")
    run = Launched(*words, f"checkpoint.remote={store}", cwd=tmp_path)
    made = tmp_path / "runs/run/metrics.jsonl"
    wait_for(lambda: made.is_file() and len(made.read_text().splitlines()) > 2)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75
    (saved,) = (tmp_path / "runs/run/checkpoints").iterdir()
    assert [one.name for one in Place(store).committed()] == [saved.name]
    assert f"waiting for the upload of {saved.name}" in run.said


@pytest.mark.full
def test_remote_run_never_waits_for_a_store_that_is_gone(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    # Nothing can be made below a file.
    (tmp_path / "store/run").mkdir(parents=True)
    (tmp_path / "store/run/step_00000004").write_text("")
    words = (*SIX, f"checkpoint.remote=file://{tmp_path}/store/run", "checkpoint.keep_every=4")
    warned = mtrain(*words, "checkpoint.on_failure=continue", cwd=tmp_path)
    assert warned.returncode == 0, warned.stderr
    # Once for failures in a row: another upload may succeed between the first and the last try.
    assert warned.stderr.count("step_00000004 cannot be uploaded") in (1, 2)
    assert result(tmp_path / "runs/run") == undisturbed
    assert uploads(tmp_path / "runs/run")[-1] == (4, "failed")
