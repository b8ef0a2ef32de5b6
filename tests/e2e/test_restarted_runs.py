"""Runs whose ranks fail and that continue by themselves: who is named, where they end, and what is
left.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.events.read import events
from tests.faults.promises import Record, differing, measured
from tests.support import faulty_writer
from tests.support.commands import SMALL, metrics, wait_for
from tests.support.covering import some
from tests.support.launched import Launched, as_rank, free_port, mtrain
from tests.support.patience import patient, slowness

pytestmark = pytest.mark.e2e

STEPS = 6
RUN = (
    *SMALL,
    "parallel=tp2",
    f"trainer.train_iters={STEPS}",
    "checkpoint.save_interval=2",
    "log.name=run",
)
# A fault in step 4, and the error that names its rank
FAULTS = {
    "kill@4:1": "rank 1 was ended by SIGKILL",
    "kill@4:0": "rank 0 was ended by SIGKILL",
    "kill_backward@4:1": "rank 1 was ended by SIGKILL",
    "kill_collective@4:1": "rank 1 was ended by SIGKILL",
    "raise@4:1": "rank 1 failed first: RuntimeError: injected fault",
    "exit@4:1": "rank 1 ended with exit code 1 and left no record",
    "hang@4:1": "rank 1 holds the run up: no progress",
    "stop@4:1": "rank 1 holds the run up: no progress",
    "stop@4:0": "rank 0 holds the run up: no progress",
}
HANGS = ("hang", "stop")
ENDS = {"kill": "dead_rank_s", "hang": "hang_s", "stop": "stopped_s"}
"""Kind of a fault -> what a run with it measures of R5."""


def restarts(run: Path) -> list[dict[str, Any]]:
    """Return the restarts that a run folder notes."""
    path = run / "restarts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(run: Path, steps: int = STEPS) -> dict[str, Any]:
    """Return the hashes of everything that the ranks saved after the last step, and the numbers of
    every step.
    """
    manifest = json.loads((run / f"checkpoints/step_{steps:08d}/manifest.json").read_text())
    state = {k: v for k, v in manifest["state"].items() if k != "digest"}
    files = manifest["files"].items()
    keys = ("step", "loss", "grad_norm", "lr", "samples")
    return {
        "shards": {n: f["header_sha256"] for n, f in files if n.startswith("rank_")},
        "state": state,
        "steps": [tuple(line[key] for key in keys) for line in metrics(run)],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of a run without faults."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*RUN, cwd=home)
    assert done.returncode == 0, done.stderr
    return result(home / "runs/run")


@pytest.mark.parametrize("fault", some(FAULTS, ["kill@4:0"]))
def test_restarted_run_ends_bitwise_like_undisturbed(
    fault: str, undisturbed: dict[str, Any], tmp_path: Path, record_property: Record
) -> None:
    words = [*RUN, "--restarts", "2", "--inject", fault]
    soft_s = 0.0
    if fault.startswith(HANGS):
        soft_s = 1.5 * slowness()
        words += [f"trainer.soft_timeout_s={soft_s}", f"trainer.timeout_s={2 * soft_s}"]
    done = mtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (noted,) = restarts(tmp_path / "runs/run")
    wrong = noted["rank"] != int(fault[-1])
    measured(record_property, kills_named=not wrong, misnamed=wrong)
    assert noted["error"].startswith(FAULTS[fault])
    assert noted["rank"] == int(fault[-1])
    for rank in (0, 1):
        kept = tmp_path / f"runs/run/{noted['records']}/collectives_rank_0000{rank}.txt"
        assert " of tp (float32 [" in kept.read_text()
    if fault.startswith(HANGS):
        assert re.search(r"(in|after) \w+ #\d+ of \S+ \(float\d\d \[", noted["error"])
    assert (noted["step"], noted["checkpoint"]) == (4, "checkpoints/step_00000002")
    assert f"restart 1 of 2: {FAULTS[fault]}" in done.stdout
    assert "(step 4); continuing from step_00000002, 1 step lost" in done.stdout
    found = result(tmp_path / "runs/run")
    measured(record_property, states=1, differing=differing(found, undisturbed))
    assert found == undisturbed
    life = json.loads((tmp_path / "runs/run/goodput.json").read_text())
    assert [attempt["end"] for attempt in life["attempts"]] == ["failed", "finished"]
    stream = list(events(tmp_path / "runs/run"))
    assert [event["step"] for event in stream if event["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event["facts"] for event in stream if event["kind"] == "restart"] == [noted]
    assert stream[-1] | {"how": "finished", "step": STEPS} == stream[-1]
    known = "no progress" if fault.startswith(HANGS) else FAULTS[fault]
    assert known in life["attempts"][0]["why"]
    down_s = life["seconds"]["down"]
    assert down_s > 2 * soft_s
    kind = fault.partition("@")[0]
    ends = {ENDS[kind]: down_s - 2 * soft_s} if kind in ENDS else {}
    measured(record_property, **ends)
    if not soft_s:
        again = life["attempts"][1]["seconds"]
        measured(record_property, first_step_s=down_s + again["starting"] + again["loading"])
    assert sum(life["seconds"].values()) == pytest.approx(life["wall_s"], abs=0.01)


@pytest.mark.full
def test_restarted_run_device_fault_is_not_restarted(tmp_path: Path) -> None:
    words = [*RUN, "--restarts", "2", "--inject", "flip_gradient@4:1"]
    done = mtrain(*words, "resilience.rerun=every_n", "resilience.rerun_interval=4", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "step 4: " in done.stderr
    assert "the device of rank 1 (" in done.stderr
    assert restarts(tmp_path / "runs/run") == []
    (found,) = [line for line in metrics(tmp_path / "runs/run") if "attribution" in line]
    assert (found["attribution"]["kind"], found["attribution"]["rank"]) == ("device", 1)


@pytest.mark.full
def test_restarted_run_without_checkpoint_begins_again(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    done = mtrain(*RUN, "--restarts", "1", "--inject", "kill@2:1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(step 2); continuing from the beginning, 1 step lost" in done.stdout
    assert result(tmp_path / "runs/run") == undisturbed


def _poisoning() -> None:
    """Give a weight of rank 1 no number before its first step 4."""
    from mtrain.train.loop import step, trainer

    def poisoned(parts: Any, **more: Any) -> Any:
        mark = Path("poisoned")
        if parts.state.step == 3 and parts.world.rank == 1 and not mark.exists():
            mark.touch()
            [*parts.state.chunks[0].parameters()][-1].data.fill_(float("nan"))
        return step.train_step(parts, **more)

    trainer.train_step = poisoned  # type: ignore[assignment]


@pytest.mark.full
def test_restarted_run_without_a_number_continues_before_it(
    undisturbed: dict[str, Any], tmp_path: Path, record_property: Record
) -> None:
    run = Launched(*RUN, "--restarts", "1", cwd=tmp_path, patch=_poisoning)
    assert run.wait() == 0, run.said
    assert "step 4: the loss is nan" in run.said
    (noted,) = restarts(tmp_path / "runs/run")
    assert noted["checkpoint"] == "checkpoints/step_00000002"
    found = result(tmp_path / "runs/run")
    measured(record_property, states=1, differing=differing(found, undisturbed))
    assert found == undisturbed


@pytest.mark.full
def test_restarted_run_in_a_loop_ends_with_first_error(
    tmp_path: Path, record_property: Record
) -> None:
    words = [*RUN, "--restarts", "9", "--inject", "always:raise@2:1"]
    done = mtrain(*words, cwd=tmp_path)
    assert done.returncode == 5
    assert done.stdout.count("injected fault") == 1
    assert done.stdout.count("rank 1 failed alike") == 2
    details = "runs/run/errors/restart_1/rank_00001.json"
    assert done.stderr.splitlines() == [
        f"rank 1 failed first: RuntimeError: injected fault; details in {details}",
        "  not restarted: 3 restarts made no step after step 1",
    ]
    assert (tmp_path / details).is_file()
    noted = restarts(tmp_path / "runs/run")
    measured(record_property, futile=len(noted))
    assert [line["restart"] for line in noted] == [1, 2, 3]


def test_restarted_run_never_after_environment_fault(tmp_path: Path) -> None:
    done = mtrain(*RUN, "--restarts", "9", "--inject", "always:oom@2:1", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    refused = (
        r"rank 1: the address space .* limited to \d+ KiB .*, and 512.0 MiB more were requested"
    )
    assert re.search(refused, done.stderr), done.stderr
    assert "fewer ranks on this machine" in done.stderr
    assert not restarts(tmp_path / "runs/run")
    # The report of that rank: tensors by module, the plan's parts, and what would need less.
    assert "rank 1 is out of memory in step 2: " in done.stderr
    (file,) = (tmp_path / "runs/run/errors").glob("out_of_memory_*")
    assert file.name == "out_of_memory_rank_00001.json"
    report = json.loads(file.read_text())
    embedding = report["modules"]["embedding.word_embeddings"]
    assert embedding["weights"] == embedding["gradients"] > 0
    assert embedding["optimizer"] >= 2 * embedding["weights"]
    assert report["modules_bytes"] + report["rest_bytes"] == report["memory"]["allocated_bytes"]
    assert report["planned_peak_bytes"] == sum(report["planned"].values())
    assert report["fix"]


def _damaged() -> None:
    """Damage the newest checkpoint at each restart."""
    from mtrain.launching.restart import Attempts

    record = Attempts._record

    def damaging(self: Attempts, *args: Any) -> None:
        assert self.checkpoint is not None
        file = self.checkpoint / "rank_00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        record(self, *args)

    Attempts._record = damaging  # type: ignore[method-assign]


@pytest.mark.full
def test_restarted_run_never_after_damage(tmp_path: Path) -> None:
    words = [*RUN, "--restarts", "9", "--inject", "kill@4"]
    run = Launched(*words, cwd=tmp_path, patch=_damaged)
    assert run.wait() == 4, run.said
    assert "step_00000002/rank_00001.safetensors" in run.said
    assert len(restarts(tmp_path / "runs/run")) == 1


def _stopped(number: signal.Signals, owner: str, method: str) -> Callable[[], None]:
    """Return a patch with which the launcher gets a signal before a method of the supervision."""

    def patch() -> None:
        from mtrain.launching import restart

        kind = getattr(restart, owner)
        real = getattr(kind, method)

        def stopping(self: Any, *args: Any) -> Any:
            os.kill(os.getpid(), number)
            return real(self, *args)

        setattr(kind, method, stopping)

    return patch


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "owner", "method", "code"),
    [
        (signal.SIGTERM, "Attempts", "_record", 75),
        (signal.SIGINT, "Attempts", "_record", 130),
        (signal.SIGTERM, "Supervisor", "_end_all", 75),
    ],
)
def test_restarted_run_stopped_between_starts_is_resumable(
    number: signal.Signals, owner: str, method: str, code: int, tmp_path: Path
) -> None:
    words = [*RUN, "--restarts", "9", "--inject", "kill@4:1"]
    run = Launched(*words, cwd=tmp_path, patch=_stopped(number, owner, method))
    assert run.wait() == code, run.said
    assert "resumed from" not in run.said
    done = mtrain(*RUN, "checkpoint.resume=latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2," in done.stdout


def _stopping_first() -> None:
    """Have a rank request a stop of the launcher before it kills itself."""
    from mtrain.world import faults

    def act() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    faults.KINDS["kill"] = faults.Kind(faults.FORWARD, act)


@pytest.mark.full
@pytest.mark.parametrize(("restarts_given", "code"), [("9", 75), ("0", 5)])
def test_restarted_run_failing_while_it_stops_is_resumable(
    restarts_given: str, code: int, tmp_path: Path
) -> None:
    words = [*RUN, "--restarts", restarts_given, "--inject", "kill@4:1"]
    run = Launched(*words, cwd=tmp_path, patch=_stopping_first)
    assert run.wait() == code, run.said
    assert "rank 1 was ended by SIGKILL" in run.said
    assert not restarts(tmp_path / "runs/run")


@pytest.mark.full
def test_restarted_run_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    words = [*RUN, "trainer.train_iters=100000", "--restarts", "1", "--inject", "kill@2"]
    run = Launched(*words, cwd=tmp_path)
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 5 or run.poll() is not None)
    ranks = run.ranks()
    assert len(ranks) == 2, run.said
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(ranks, timeout=patient(30))
    assert not alive


def _executing() -> None:
    """Have ranks executed, as on a device that does not survive a fork."""
    from mtrain.launching import start

    start.may_fork = lambda run: False  # type: ignore[assignment]


@pytest.mark.full
def test_restarted_run_of_executed_ranks_ends_bitwise(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = [*RUN, "--restarts", "1", "--inject", "kill@4:1"]
    run = Launched(*words, cwd=tmp_path, patch=_executing)
    assert run.wait() == 0, run.said
    assert "restart 1 of 1: rank 1 was ended by SIGKILL (step 4)" in run.said
    assert (tmp_path / "runs/run/start.json").is_file()
    kept = (tmp_path / "runs/run/errors/restart_1/collectives_rank_00001.txt").read_text()
    assert " of tp (float32 [" in kept
    assert result(tmp_path / "runs/run") == undisturbed


def _counting() -> None:
    """Write the launcher's descriptors, threads and children, and shared memory, at each
    restart.
    """
    from mtrain.launching.restart import Attempts

    record = Attempts._record

    def counted(self: Attempts, *args: Any) -> None:
        record(self, *args)
        own = psutil.Process()
        counts = (own.num_fds(), own.num_threads(), len(own.children(recursive=True)))
        shared = len(os.listdir("/dev/shm"))
        with Path("counts").open("a") as file:
            file.write(json.dumps([*counts, shared]) + "\n")

    Attempts._record = counted  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    [
        ("tp2pp2", 4, ()),
        ("dp4", 4, ("checkpoint.async_save=true",)),
        ("ep2", 2, ("model=mixtral_tiny",)),
    ],
    ids=["tp2pp2", "dp4", "ep2"],
)
def test_restarted_run_names_every_killed_rank_and_leaks_nothing(
    layout: str,
    ranks: int,
    more: tuple[str, ...],
    tmp_path: Path,
    record_property: Record,
) -> None:
    kills = 20
    dice = random.Random(kills)
    planned = [
        (dice.choice(("kill", "kill_backward")), step, dice.randrange(ranks))
        for step in range(1, kills + 1)
    ]
    inject = ",".join(f"{kind}@{step}:{rank}" for kind, step, rank in planned)
    words = [*RUN, *more, f"parallel={layout}", f"trainer.train_iters={kills}"]
    words += ["checkpoint.save_interval=1", "--restarts", str(kills), "--inject", inject]
    run = Launched(*words, cwd=tmp_path, patch=_counting)
    assert run.wait(300) == 0, run.said
    noted = restarts(tmp_path / "runs/run")
    found = [(line["kind"], line["step"], line["rank"]) for line in noted]
    expected = [("SIGKILL", step, rank) for _, step, rank in planned]
    wrong = sum(map(tuple.__ne__, found, expected))
    measured(record_property, kills_named=len(found) - wrong, misnamed=wrong)
    assert found == expected
    counts = [json.loads(line) for line in (tmp_path / "counts").read_text().splitlines()]
    assert len(counts) == kills
    assert counts[0][1:3] == [1, 0]
    # other processes of the machine may use shared memory, too
    assert [count[:3] for count in counts] == [counts[0][:3]] * kills
    assert counts[-1][3] <= counts[0][3] + 4


IN_PROCESS = "resilience.in_process=true"


def begun(run: Path) -> list[int]:
    """Return the process of rank 0 in each attempt."""
    lines = map(json.loads, (run / "life.jsonl").read_text().splitlines())
    return [line["process"] for line in lines if line["kind"] == "begin"]


def test_restarted_in_process_ends_bitwise_like_undisturbed(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = [*RUN, IN_PROCESS, "--restarts", "2", "--inject", "raise@4:1,raise@6:0"]
    done = mtrain(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/run"
    noted = restarts(run)
    found = [(line["in_process"], line["rank"], line["step"], line["steps_lost"]) for line in noted]
    assert found == [(True, 1, 4, 1), (True, 0, 6, 1)]
    assert "restart 1 of 2: rank 1 failed first: RuntimeError: injected fault" in done.stdout
    assert "in the same processes (memory of rank " in done.stdout
    assert [line["survivors"] for line in noted] == [[0, 0], [0, 0]]
    assert len(set(begun(run))) == 1
    assert result(run) == undisturbed
    life = json.loads((run / "goodput.json").read_text())
    assert [attempt["end"] for attempt in life["attempts"]] == ["failed", "failed", "finished"]
    assert "rank 1 failed first" in life["attempts"][0]["why"]
    assert life["steps_again"] == 2
    assert sum(life["seconds"].values()) == pytest.approx(life["wall_s"], abs=0.01)


def _counting_ranks() -> None:
    """Write the descriptors, threads and children of a rank each time that it has released all."""
    from mtrain.world import abandon

    release = abandon.release

    def counted(device: Any) -> int:
        alive = release(device)
        own = psutil.Process()
        counts = [own.num_fds(), own.num_threads(), len(own.children(recursive=True))]
        with Path(f"counts-{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(counts) + "\n")
        return alive

    abandon.release = counted


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    [
        ("tp2", 2, ()),
        ("dp2", 2, ("checkpoint.async_save=true",)),
        ("tp2pp2", 4, ("trainer.global_batch_size=8",)),
        ("ep2", 2, ("model=mixtral_tiny",)),
    ],
    ids=["tp2", "dp2", "tp2pp2", "ep2"],
)
def test_restarted_in_process_twenty_times_leaks_nothing(
    layout: str, ranks: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    times = 20
    faults = ",".join(f"raise@{step}:{step % ranks}" for step in range(2, times + 2))
    words = [*RUN, *more, f"parallel={layout}", f"trainer.train_iters={times + 2}"]
    words += ["checkpoint.save_interval=1", "log.name=run"]
    whole = tmp_path / "whole"
    whole.mkdir()
    done = mtrain(*words, cwd=whole)
    assert done.returncode == 0, done.stderr
    shared = len(os.listdir("/dev/shm"))
    words += [IN_PROCESS, "--restarts", str(times), "--inject", faults]
    disturbed = Launched(*words, cwd=tmp_path, patch=_counting_ranks)
    assert disturbed.wait(300) == 0, disturbed.said
    run = tmp_path / "runs/run"
    noted = restarts(run)
    assert [line["rank"] for line in noted] == [step % ranks for step in range(2, times + 2)]
    assert all(line["in_process"] for line in noted)
    assert len(set(begun(run))) == 1
    assert result(run, times + 2) == result(whole / "runs/run", times + 2)
    assert [line["survivors"] for line in noted] == [[0] * ranks] * times
    first = noted[0]["bytes_after"]
    last = noted[-1]["bytes_after"]
    assert all(now <= 1.02 * before for before, now in zip(first, last, strict=True))
    for rank in range(ranks):
        lines = (tmp_path / f"counts-{rank}").read_text().splitlines()
        counts = [json.loads(line) for line in lines]
        assert counts == [counts[0]] * times
        assert counts[0][2] == 0
    # other processes of the machine may use shared memory, too
    assert len(os.listdir("/dev/shm")) <= shared + 4


@pytest.mark.full
def test_restarted_in_process_commits_what_is_staged(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    def slow() -> None:
        faulty_writer.use("sleep", 3, 1, once=tmp_path / "slept", seconds=1.0)

    words = [*RUN, "checkpoint.async_save=true", IN_PROCESS, "--restarts", "1"]
    run = Launched(*words, "--inject", "raise@3:0", cwd=tmp_path, patch=slow)
    assert run.wait() == 0, run.said
    assert (tmp_path / "slept").exists()
    # The writer of rank 1 still slept when the rank failed.
    (noted,) = restarts(tmp_path / "runs/run")
    assert (noted["checkpoint"], noted["steps_lost"]) == ("checkpoints/step_00000002", 0)
    assert result(tmp_path / "runs/run") == undisturbed


@pytest.mark.full
def test_restarted_in_process_hands_a_dead_rank_to_launcher(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    words = [*RUN, IN_PROCESS, "--restarts", "3"]
    faults = "raise@3:0,kill@4:1,raise@5:1"
    done = mtrain(*words, "--inject", faults, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/run"
    noted = restarts(run)
    assert [(line["restart"], line["in_process"]) for line in noted] == [
        (1, True),
        (2, False),
        (3, True),
    ]
    assert noted[1]["error"].startswith("rank 1 was ended by SIGKILL")
    first, second, third, fourth = begun(run)
    assert first == second
    assert first != third == fourth
    assert result(run) == undisturbed
    life = json.loads((run / "goodput.json").read_text())
    assert [attempt["end"] for attempt in life["attempts"]] == [*["failed"] * 3, "finished"]
    assert "SIGKILL" in life["attempts"][1]["why"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "faults", "why"),
    [
        ("9", "always:raise@2:1", "3 restarts made no step after step 1"),
        ("1", "raise@2:1,raise@4:1", "all 1 restarts (resilience.restarts) are used"),
    ],
    ids=["futile", "used"],
)
def test_restarted_in_process_ends_at_the_same_limits(
    given: str, faults: str, why: str, tmp_path: Path
) -> None:
    done = mtrain(*RUN, IN_PROCESS, "--restarts", given, "--inject", faults, cwd=tmp_path)
    assert done.returncode == 5
    first, second = done.stderr.splitlines()
    assert first.startswith("rank 1 failed first: RuntimeError: injected fault; details in ")
    assert (tmp_path / first.partition("details in ")[2].partition(";")[0]).is_file()
    assert second == f"  not restarted: {why}"
    assert all(line["in_process"] for line in restarts(tmp_path / "runs/run"))


@pytest.mark.full
def test_restarted_in_process_never_after_environment_fault(tmp_path: Path) -> None:
    words = [*RUN, IN_PROCESS, "--restarts", "9", "--inject", "oom@2:1"]
    done = mtrain(*words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "512.0 MiB more were requested" in done.stderr
    assert not restarts(tmp_path / "runs/run")


def test_restarted_run_of_another_launcher_is_refused(tmp_path: Path) -> None:
    environment = as_rank(0, 1, free_port(), LOCAL_RANK="0")
    words = [*RUN, "parallel=tp1", "--restarts", "2"]
    run = Launched(*words, cwd=tmp_path, environment=environment)
    assert run.wait() == 2, run.said
    assert "error[MT437] resilience.restarts=2" in run.said
    assert "torchrun --max-restarts=N" in run.said


def test_restarted_run_faults_are_no_setting(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("inject: kill@3\n")
    refused = mtrain("check", "recipe=mine.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "inject" in refused.stderr
    assert "--inject" not in mtrain("train", "--help", cwd=tmp_path).stdout
    wrong = mtrain("--inject", "melt@3", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "melt@3 is no fault" in wrong.stderr
