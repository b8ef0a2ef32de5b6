"""Runs that are killed or stopped: who is named, what is left behind, and where the resumed run
ends.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.promises import Record, differing, measured
from tests.support import save_moments
from tests.support.commands import SMALL, metrics, wait_for
from tests.support.launched import Launched, mtrain
from tests.support.patience import patient, slowness

pytestmark = pytest.mark.e2e

STEPS = 24
INTERVAL = 8
RUN = (
    *SMALL,
    f"trainer.train_iters={STEPS}",
    f"checkpoint.save_interval={INTERVAL}",
    "log.name=run",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without interruptions."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*RUN, cwd=home)
    assert done.returncode == 0, done.stderr
    return home / "runs/run"


def _shards(run: Path) -> dict[str, str]:
    """Return the hashes of everything that each rank saved after the last step: weights, moments
    and random generators.
    """
    manifest = json.loads((run / f"checkpoints/step_{STEPS:08d}/manifest.json").read_text())
    files = {
        name: facts["header_sha256"]
        for name, facts in manifest["files"].items()
        if name.startswith("rank_")
    }
    state = {k: v for k, v in manifest["state"].items() if k != "digest"}
    return files | {"state": json.dumps(state, sort_keys=True)}


def _losses(run: Path) -> list[tuple[object, ...]]:
    return [
        tuple(line[k] for k in ("step", "loss", "grad_norm", "lr", "samples"))
        for line in metrics(run)
    ]


def _end(process: Launched, ranks: list[psutil.Process]) -> str:
    process.wait(30)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    return process.said


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_interrupted_run_killed_rank_resumes_bitwise(
    seed: int, uninterrupted: Path, tmp_path: Path, record_property: Record
) -> None:
    dice = random.Random(seed)
    victim = dice.randrange(2)
    when = dice.randrange(0, STEPS - 12)
    run = tmp_path / "runs/run"
    process = Launched(*RUN, cwd=tmp_path)
    wait_for(lambda: len(metrics(run)) > when or process.poll() is not None)
    ranks = process.ranks()
    assert len(ranks) == 2
    ranks[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output = _end(process, ranks)
    measured(record_property, dead_rank_s=time.monotonic() - killed)
    assert time.monotonic() - killed < patient(30)
    assert process.returncode == 5, output
    assert f"rank {victim} was ended by SIGKILL" in output
    assert re.search(r"^  collectives: ranks? .* (in|after) \w+ #\d+ of ", output, re.M), output

    done = mtrain(*RUN, "checkpoint.resume=latest", cwd=tmp_path)
    lived_s = time.monotonic() - process.began
    assert done.returncode == 0, done.stderr
    _compare(run, uninterrupted, record_property)
    ends = _accounted(run, lived_s)
    assert ends == [("failed", f"rank {victim} was ended by SIGKILL"), ("finished", "")]
    assert "goodput " in done.stdout


def _compare(run: Path, uninterrupted: Path, record: Record) -> None:
    """Require the losses and the state of the run without interruptions."""
    expected = _shards(uninterrupted)
    found = _shards(run)
    measured(record, states=1, differing=differing(found, expected))
    assert _losses(run) == _losses(uninterrupted)
    assert found == expected


def _accounted(run: Path, lived_s: float) -> list[tuple[str, str]]:
    """Compare the life of a run with what was measured outside; return how its attempts ended."""
    life = json.loads((run / "goodput.json").read_text())
    assert abs(lived_s - life["wall_s"]) < max(0.01 * lived_s, 0.2 * slowness())
    assert sum(life["seconds"].values()) == pytest.approx(life["wall_s"], abs=0.01)
    assert life["step"] == STEPS
    assert life["steps"] - life["steps_again"] == STEPS
    assert all(life["seconds"][cause] > 0 for cause in ("stepping", "saving", "loading", "down"))
    return [(attempt["end"], attempt["why"]) for attempt in life["attempts"]]


@pytest.mark.full
@pytest.mark.parametrize("steps", [0, 10])
def test_interrupted_run_killed_launcher_resumes_bitwise(
    steps: int, uninterrupted: Path, tmp_path: Path, record_property: Record
) -> None:
    process = Launched(*RUN, cwd=tmp_path)
    run = tmp_path / "runs/run"
    wait_for(lambda: len(metrics(run)) > steps or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    assert not (run / "goodput.json").exists()
    again = Launched(*RUN, "checkpoint.resume=latest", cwd=tmp_path)
    again.wait(60)
    lived_s = time.monotonic() - process.began
    assert again.returncode == 0, again.said
    assert _accounted(run, lived_s) == [("killed", ""), ("finished", "")]
    _compare(run, uninterrupted, record_property)


def test_interrupted_run_stop_saves_and_resume_continues(
    uninterrupted: Path, tmp_path: Path, record_property: Record
) -> None:
    process = Launched(*RUN, cwd=tmp_path)
    run = tmp_path / "runs/run"
    wait_for(lambda: len(metrics(run)) > 2 or process.poll() is not None)
    ranks = process.ranks()
    stopped = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and every rank
    output = _end(process, ranks)
    measured(record_property, stop_s=time.monotonic() - stopped)
    assert process.returncode == 75, output
    assert "checkpoint.resume=latest" in output
    stopped_at = metrics(run)[-1]["step"]
    assert (run / f"checkpoints/step_{stopped_at:08d}/manifest.json").exists()

    done = mtrain("resume", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"step {stopped_at}," in done.stdout
    _compare(run, uninterrupted, record_property)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["in a step", "in a save"])
def test_interrupted_run_second_stop_keeps_checkpoints(
    moment: str, tmp_path: Path, record_property: Record
) -> None:
    def patch() -> None:
        if moment == "in a save":
            save_moments.use("before the rename", 2 * INTERVAL, save_moments.WAIT)

    words = [*RUN, "checkpoint.async_save=false"]
    if moment == "in a step":
        words.append("trainer.train_iters=100000")
    process = Launched(*words, cwd=tmp_path, patch=patch)
    run = tmp_path / "runs/run"
    first = run / f"checkpoints/step_{INTERVAL:08d}/manifest.json"
    reached = first if moment == "in a step" else tmp_path / "moment"
    wait_for(lambda: reached.exists() or process.poll() is not None)
    before = first.read_bytes()
    ranks = process.ranks()
    os.kill(process.pid, signal.SIGTERM)
    if moment == "in a save":  # else one signal may be handled for both
        time.sleep(0.2)
        assert process.poll() is None, "the first stop waits for the save"
    stopped = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    output = _end(process, ranks)
    measured(record_property, second_stop_s=time.monotonic() - stopped)
    assert process.returncode in (75, 130), output
    if moment == "in a save":
        assert process.returncode == 130
        assert first.read_bytes() == before
        resumed = mtrain("resume", "runs/run", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert f"step {INTERVAL}," in resumed.stdout
    assert list((run / "checkpoints").glob("step_*/manifest.json"))


def test_interrupted_run_killed_launcher_leaves_no_rank(
    tmp_path: Path, record_property: Record
) -> None:
    process = Launched(*RUN, "trainer.train_iters=100000", cwd=tmp_path)
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 2 or process.poll() is not None)
    ranks = process.ranks()
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=patient(30))
    measured(record_property, orphans_s=time.monotonic() - killed)
    assert not alive


@pytest.mark.full
def test_interrupted_run_killed_before_checkpoint_starts_again(
    uninterrupted: Path, tmp_path: Path
) -> None:
    words = [w for w in RUN if not w.startswith("checkpoint.save_interval")] + [
        "checkpoint.save_interval=1000"
    ]
    process = Launched(*words, cwd=tmp_path)
    run = tmp_path / "runs/run"
    wait_for(lambda: len(metrics(run)) > 3 or process.poll() is not None)
    process.ranks()[1].send_signal(signal.SIGKILL)
    process.wait(30)
    done = mtrain(*words, "checkpoint.resume=latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _losses(run) == _losses(uninterrupted)


def test_interrupted_run_raising_rank_is_named_despite_peer(
    tmp_path: Path,
) -> None:
    def with_a_fault() -> None:
        from mtrain.train.loop import step, trainer

        def faulty(parts: Any, *, stop_requested: Any) -> Any:
            if parts.state.step == 3 and parts.world.rank == 1:
                raise ValueError("seeded fault")
            return step.train_step(parts, stop_requested=stop_requested)

        trainer.train_step = faulty  # type: ignore[assignment]

    run = Launched(*RUN, cwd=tmp_path, patch=with_a_fault)
    assert run.wait() == 5
    assert re.search(r"rank 1 failed first: ValueError: seeded fault", run.said), run.said
    assert "Traceback" not in run.said
    record = json.loads((tmp_path / "runs/run/errors/rank_00001.json").read_text())
    assert "seeded fault" in record["traceback"]


@pytest.mark.full
def test_interrupted_run_full_disk_keeps_previous_checkpoint(tmp_path: Path) -> None:
    words = [*RUN[:-3], "trainer.train_iters=8", "checkpoint.save_interval=4", "log.name=run"]
    assert mtrain(*words, cwd=tmp_path).returncode == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))  # noqa: E731
    more = ["resume", "runs/run", "trainer.train_iters=12", "checkpoint.accept_changes=true"]
    run = Launched(*more, cwd=tmp_path, patch=limit)
    assert run.wait(60) == 5, run.said
    assert "cannot be written" in run.said
    assert "Traceback" not in run.said
    left = sorted(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir())
    assert left == ["step_00000004", "step_00000008"]
    again = mtrain(
        "resume",
        "runs/run",
        "trainer.train_iters=12",
        "checkpoint.accept_changes=true",
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.full
@pytest.mark.parametrize("left", ["one byte", "half", "none"])
def test_interrupted_run_cut_checkpoint_gives_way_to_earlier(
    left: str, uninterrupted: Path, tmp_path: Path, record_property: Record
) -> None:
    shutil.copytree(uninterrupted.parent, tmp_path / "runs")
    run = tmp_path / "runs/run"
    shard = run / f"checkpoints/step_{STEPS:08d}/rank_00001.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, {"one byte": size - 1, "half": size // 2, "none": 0}[left])
    refused = mtrain("resume", "runs/run", cwd=tmp_path)
    assert refused.returncode == 4
    assert str(shard.relative_to(tmp_path)) in refused.stderr
    earlier = f"runs/run/checkpoints/step_{STEPS - INTERVAL:08d}"
    done = mtrain("resume", earlier, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _compare(run, uninterrupted, record_property)
