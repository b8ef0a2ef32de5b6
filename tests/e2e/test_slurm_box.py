"""Jobs of a real SLURM with four virtual nodes: they train, are stopped, or lose a machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.clusters.launchers import render
from tests.support.commands import SMALL, command, metrics
from tests.support.launched import mtrain
from tests.support.patience import patient
from tests.support.slurm_box import ENDS, NODES, Box
from tests.support.slurm_packages import Unavailable

pytestmark = [pytest.mark.e2e, pytest.mark.full]

STEPS = 60
RUN = (
    *SMALL,
    "cluster=cpu",
    "parallel=tp2",
    f"trainer.train_iters={STEPS}",
    "checkpoint.save_interval=20",
    "log.name=run",
)
JOB = (
    *RUN,
    "launch=slurm",
    f"launch.command=[{sys.executable},-m,mtrain]",
    "cluster.nodes=2",
    "cluster.devices_per_node=1",
)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    try:
        cluster = Box(tmp_path_factory.mktemp("slurm"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def local_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function of a number of ranks: it returns the folder of a run that many local ranks
    made, without SLURM.
    """

    @cache
    def run(ranks: int) -> Path:
        home = tmp_path_factory.mktemp(f"local{ranks}")
        done = mtrain(*RUN, f"cluster.devices_per_node={ranks}", cwd=home)
        assert done.returncode == 0, done.stderr
        return home / "runs/run"

    return run


@pytest.fixture(autouse=True)
def idle(box: Box) -> Iterator[None]:
    """Leave no job and no lost node to the next test."""
    yield
    box.reset()


def submitted(box: Box, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("submit", *JOB, *words),
        cwd=folder,
        env={**box.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )


def number_of(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split("Submitted batch job ")[1])


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("slurm-*.out"))


def wait_for_step(box: Box, job: int, folder: Path, step: int) -> None:
    deadline = time.monotonic() + patient(60)
    while not any(line["step"] >= step for line in metrics(folder / "runs/run")):
        state = box.job(job)["JobState"]
        assert state not in ENDS, f"{state}: {output(folder)}"
        assert time.monotonic() < deadline, output(folder) + box.said()
        time.sleep(0.05)


def ended(run: Path) -> dict[str, object]:
    """Return the losses of all steps, and hashes of all that the ranks saved after the last one."""
    manifest = json.loads((run / f"checkpoints/step_{STEPS:08d}/manifest.json").read_text())
    keys = ("step", "loss", "grad_norm", "lr", "samples")
    return {
        "metrics": [[line[key] for key in keys] for line in metrics(run)],
        "state": {k: v for k, v in manifest["state"].items() if k != "digest"},
        "files": {
            name: facts["header_sha256"]
            for name, facts in manifest["files"].items()
            if name.startswith("rank_")
        },
    }


def requeued(box: Box, job: int) -> None:
    """Wait until a job is requeued, and let it start without SLURM's delay of two minutes."""
    assert box.wait_for_state(job, "PENDING")["Restarts"] == "1"
    # A node refuses the credential of a job that it has ended in the same second.
    time.sleep(1.5)
    box.run("scontrol", "update", f"JobId={job}", "StartTime=now")


def completed(box: Box, job: int, folder: Path) -> str:
    """Wait for the success of a job and return what it printed."""
    box.wait_for_state(job, "COMPLETED")
    return output(folder)


def test_slurm_box_job_ends_as_a_local_run(
    box: Box, local_runs: Callable[[int], Path], tmp_path: Path
) -> None:
    done = submitted(box, tmp_path)
    lines = done.stdout.splitlines()
    assert "2 machines with 1 rank each" in lines[0]
    # what sbatch --test-only prints comes before the job is submitted
    assert "to start at" in lines[1], done.stdout
    completed(box, number_of(done), tmp_path)
    assert ended(tmp_path / "runs/run") == ended(local_runs(2))


@pytest.mark.parametrize("tasks", ["machine", "device"])
def test_slurm_box_term_requeues_and_ends_bitwise(
    tasks: str, box: Box, local_runs: Callable[[int], Path], tmp_path: Path
) -> None:
    words = (f"launch.tasks={tasks}", "cluster.devices_per_node=2")
    job = number_of(submitted(box, tmp_path, *words))
    wait_for_step(box, job, tmp_path, 5)
    box.run("scancel", "--batch", "--signal=TERM", str(job))
    box.wait_for_state(job, "PENDING")
    step = metrics(tmp_path / "runs/run")[-1]["step"]
    assert 5 <= step < STEPS
    requeued(box, job)
    printed = completed(box, job, tmp_path)
    # A process that starts the ranks of its machine does not know their step.
    after = f" after step {step} of {STEPS}" if tasks == "device" else ";"
    assert f"stopped on request{after}" in printed
    assert f"resumed from runs/run/checkpoints/step_{step:08d}: step {step}," in printed
    assert ended(tmp_path / "runs/run") == ended(local_runs(4))


def test_slurm_box_term_before_training_requeues(box: Box, tmp_path: Path) -> None:
    job = number_of(submitted(box, tmp_path))
    box.wait_for_state(job, "RUNNING")
    box.run("scancel", "--batch", "--signal=TERM", str(job))
    assert box.wait_for_state(job, "PENDING")["Restarts"] == "1"


@pytest.mark.parametrize("lost", [0, 1])
def test_slurm_box_lost_machine_continues_elsewhere(
    lost: int, box: Box, local_runs: Callable[[int], Path], tmp_path: Path
) -> None:
    job = number_of(submitted(box, tmp_path))
    wait_for_step(box, job, tmp_path, 25)
    assert box.job(job)["NodeList"] == "127.0.0.[1-2]"
    box.kill_node(NODES[lost])
    if lost == 0:  # SLURM notices the other case by itself, which takes longer
        box.run("scontrol", "update", f"NodeName={NODES[lost]}", "State=DOWN", "Reason=lost")
    requeued(box, job)
    printed = completed(box, job, tmp_path)
    assert "resumed from runs/run/checkpoints/step_00000020: step 20," in printed
    assert NODES[lost] not in box.job(job)["NodeList"]
    assert ended(tmp_path / "runs/run") == ended(local_runs(2))


def test_slurm_box_fewer_machines_have_close_losses(
    box: Box, local_runs: Callable[[int], Path], tmp_path: Path
) -> None:
    job = number_of(submitted(box, tmp_path, "launch.relayout=true"))
    wait_for_step(box, job, tmp_path, 5)
    box.run("scancel", "--batch", "--signal=TERM", str(job))
    box.wait_for_state(job, "PENDING")
    box.run("scontrol", "update", f"JobId={job}", "NumNodes=1-1", "NumTasks=1")
    requeued(box, job)
    printed = completed(box, job, tmp_path)
    assert "one rank on 1 cpu rank" in printed
    losses, expected = (
        [line["loss"] for line in metrics(run)] for run in (tmp_path / "runs/run", local_runs(2))
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 1


def test_slurm_box_cancelled_job_saves_and_stays_away(box: Box, tmp_path: Path) -> None:
    job = number_of(submitted(box, tmp_path))
    wait_for_step(box, job, tmp_path, 5)
    box.run("scancel", str(job))
    box.wait_for_state(job, "CANCELLED")
    box.wait_until_idle()
    step = metrics(tmp_path / "runs/run")[-1]["step"]
    assert (tmp_path / f"runs/run/checkpoints/step_{step:08d}/manifest.json").exists()
    assert box.job(job)["Restarts"] == "0"


def test_slurm_box_lost_machines_without_relayout_exit_3(box: Box, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(render(load(JOB, to_run=False).run))
    words = ("sbatch", "--parsable", "--nodes=3", "--ntasks=3", str(file))
    job = int(box.run(*words, cwd=tmp_path))
    assert box.wait_for_state(job, "FAILED")["ExitCode"] == "3:0"
    printed = output(tmp_path)
    assert "The run needs 2 machines, and the job has another number: 3." in printed
    assert f"scontrol update JobId={job} NumNodes=2-2 NumTasks=2" in printed


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("launch.partition=nowhere",), "launch.partition=nowhere"),
        (("launch.partition=short", "launch.time=1:00:00"), "launch.time=1:00:00"),
        (("launch.segment=2",), "launch.segment=2"),
        (("cluster.nodes=8",), "cluster.nodes=8"),
    ],
)
def test_slurm_box_refusal_names_the_key(
    words: tuple[str, ...], key: str, box: Box, tmp_path: Path
) -> None:
    done = submitted(box, tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"error[MT022] {key}: cannot submit this job" in done.stderr
    assert "Submitted" not in done.stdout
    assert not box.run("squeue", "--noheader")


HOSTILE = "x'; touch canary; $(touch canary) `touch canary` \" \\"
RECORD = """printf "%s\\n" "$0" "$@" "$SECRET" > arguments"""


def test_slurm_box_hostile_values_run_nothing(box: Box, tmp_path: Path) -> None:
    run = load([*JOB, "launch.env=[SECRET]"], to_run=False).run
    log = run.log.model_copy(update={"name": HOSTILE, "runs_dir": HOSTILE})
    launch = run.launch.model_copy(
        update={
            "workdir": HOSTILE,
            "setup": f"./setup {HOSTILE}",
            "command": ("bash", "-c", RECORD, HOSTILE),
        }
    )
    recipe = run.recipe.model_copy(update={"title": f"END_OF_RUN_YAML\n{HOSTILE}"})
    file = tmp_path / "job.sbatch"
    file.write_text(render(run.model_copy(update={"log": log, "launch": launch, "recipe": recipe})))
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / f"setup {HOSTILE}").touch()
    job = int(box.run("sbatch", "--parsable", str(file), cwd=tmp_path, SECRET="$(touch canary)"))
    completed(box, job, tmp_path)
    words = (tmp_path / HOSTILE / "arguments").read_text().splitlines()
    assert (words[0], words[-1]) == (HOSTILE, "$(touch canary)")
    assert not list(tmp_path.rglob("canary"))
    assert re.fullmatch("[a-z0-9-]+", box.job(job)["JobName"])
