"""Runs on two machines, each a launcher of its own on this one: restarts, and lost machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import SMALL, metrics, wait_for
from tests.support.covering import some
from tests.support.launched import Launched, free_port, mtrain
from tests.support.patience import patient, slowness

pytestmark = pytest.mark.e2e

RUN = (*SMALL, "cluster=cpu", "parallel=dp2", "checkpoint.save_interval=2", "log.name=run")
STEPS = 6
TO_THE_END = (*RUN, f"trainer.train_iters={STEPS}")
ENDLESS = (*RUN, "trainer.train_iters=100000", "checkpoint.save_interval=100000")
# A fault in step 4, and the error that names its rank
FAULTS = {
    "kill@4:1": "rank 1 was ended by SIGKILL",
    "kill@4:0": "rank 0 was ended by SIGKILL",
    "raise@4:1": "rank 1 failed first: RuntimeError: injected fault",
    "hang@4:1": "rank 1 holds the run up: no progress",
}


class Machines:
    """The launchers of a run, which end with the test."""

    def __init__(self, home: Path, count: int = 2) -> None:
        self.home = home
        self.count = count
        self.port = str(free_port())
        self.all: list[Launched] = []

    def start(self, number: int, *words: str, patch: Callable[[], None] | None = None) -> Launched:
        """Start the launcher of a machine."""
        place = {"MTRAIN_MACHINE": str(number), "MTRAIN_MACHINES": str(self.count)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        launched = Launched(*words, cwd=self.home, environment=place, patch=patch)
        self.all.append(launched)
        return launched

    def every(self, *words: str, patch: Callable[[], None] | None = None) -> list[Launched]:
        """Start the launchers of all machines."""
        return [self.start(number, *words, patch=patch) for number in range(self.count)]

    @property
    def run(self) -> Path:
        """Return the run folder."""
        return self.home / "runs/run"

    def result(self) -> dict[str, Any]:
        """Return the hashes of what the ranks saved after the last step, and every step's loss."""
        manifest = json.loads(
            (self.run / f"checkpoints/step_{STEPS:08d}/manifest.json").read_text()
        )
        files = manifest["files"].items()
        return {
            "shards": {n: f["header_sha256"] for n, f in files if n.startswith("rank_")},
            "steps": [
                (line["step"], line["loss"], line["grad_norm"]) for line in metrics(self.run)
            ],
        }

    def restarts(self) -> list[dict[str, Any]]:
        """Return the restarts that the run folder notes."""
        path = self.run / "restarts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def machines(tmp_path: Path) -> Any:
    started = Machines(tmp_path)
    yield started
    for launched in started.all:
        launched.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of a run of one machine without faults."""
    home = tmp_path_factory.mktemp("whole")
    done = mtrain(*TO_THE_END, cwd=home)
    assert done.returncode == 0, done.stderr
    return Machines(home).result()


def _executing() -> None:
    """Have ranks executed, as on a device that does not survive a fork."""
    from mtrain.launching import start

    start.may_fork = lambda run: False  # type: ignore[assignment]


@pytest.mark.parametrize("fault", some(FAULTS, ["kill@4:1"]))
def test_machines_restarted_run_ends_bitwise(
    fault: str, machines: Machines, undisturbed: dict[str, Any]
) -> None:
    words = [*TO_THE_END, "--restarts", "2", "--inject", fault]
    soft_s = 0.0
    if fault.startswith("hang"):
        soft_s = 1.5 * slowness()
        words += [f"trainer.soft_timeout_s={soft_s}", f"trainer.timeout_s={2 * soft_s}"]
    started = machines.every(*words)
    assert [one.wait() for one in started] == [0, 0], [one.said for one in started]
    (noted,) = machines.restarts()
    assert noted["error"].startswith(FAULTS[fault])
    assert (noted["rank"], noted["step"]) == (int(fault[-1]), 4)
    assert noted["checkpoint"] == "checkpoints/step_00000002"
    assert f"restart 1 of 2: {FAULTS[fault]}" in started[0].said
    assert "restart 1 of" not in started[1].said
    assert machines.result() == undisturbed
    life = json.loads((machines.run / "goodput.json").read_text())
    assert [attempt["end"] for attempt in life["attempts"]] == ["failed", "finished"]
    known = "no progress" if fault.startswith("hang") else FAULTS[fault]
    assert known in life["attempts"][0]["why"]
    assert sum(life["seconds"].values()) == pytest.approx(life["wall_s"], abs=0.01)


@pytest.mark.full
def test_machines_executed_ranks_end_bitwise(
    machines: Machines, undisturbed: dict[str, Any]
) -> None:
    words = [*TO_THE_END, "--restarts", "1", "--inject", "kill@4:1"]
    started = machines.every(*words, patch=_executing)
    assert [one.wait() for one in started] == [0, 0], [one.said for one in started]
    assert len(machines.restarts()) == 1
    assert machines.result() == undisturbed


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "restarts"), [("always:oom@2:1", 3, 0), ("always:raise@2:1", 5, 3)]
)
def test_machines_stop_restarting_where_it_is_futile(
    fault: str, code: int, restarts: int, machines: Machines
) -> None:
    started = machines.every(*TO_THE_END, "--restarts", "9", "--inject", fault)
    assert [one.wait() for one in started] == [code, code], [one.said for one in started]
    assert len(machines.restarts()) == restarts
    assert "rank 1" in started[1].said


def _losing_disk() -> None:
    """Have the second machine lose its local disk before it shows what it holds."""
    from mtrain.ckpt import local

    intact = local.intact

    def losing(home: Path, than: int, machine: int) -> list[int]:
        for part in Path("local").glob("*/checkpoints_1/step_*"):
            shutil.rmtree(part)
        return intact(home, than, machine)

    local.intact = losing


def _dying_after_a_part() -> None:
    """Have a rank that is killed wait until both machines have a part: a loaded machine may write
    for longer than three steps take.
    """
    from mtrain.world import faults

    kind = faults.KINDS["kill"]

    def act() -> None:
        wait_for(lambda: all(any(Path("local").glob(f"*/checkpoints_{n}/step_*")) for n in (0, 1)))
        kind.act()

    faults.KINDS["kill"] = faults.Kind(kind.moment, act)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lost", "ahead", "layout"),
    [
        ("no disk", "true", "tp2"),
        ("no disk", "false", "dp2"),
        ("no disk", "true", "tp2dp2"),
        ("no disk", "false", "dp4"),
        ("a disk", "true", "dp2"),
    ],
)
def test_machines_restart_from_local_parts_ends_bitwise(
    ahead: str, lost: str, layout: str, machines: Machines, tmp_path: Path
) -> None:
    words = [*TO_THE_END, f"parallel={layout}", "checkpoint.save_interval=4"]
    whole = Machines(tmp_path / "whole")
    whole.home.mkdir()
    done = mtrain(*words, cwd=whole.home)
    assert done.returncode == 0, done.stderr
    # Saved in the run folder after steps 4 and 6, and locally after steps 2, 3 and 5
    words += ["checkpoint.local_interval=1", "checkpoint.local_dir=local", "--restarts", "1"]
    words += [f"checkpoint.async_save={ahead}", "--inject", "kill@4:1"]

    def patch() -> None:
        _dying_after_a_part()
        if lost == "a disk":
            _losing_disk()

    started = machines.every(*words, patch=patch)
    assert [one.wait() for one in started] == [0, 0], [one.said for one in started]
    (noted,) = machines.restarts()
    if lost == "a disk":
        assert noted["checkpoint"] is None
        assert "machine 1 (" in started[0].said
        assert "does not hold its part" in started[0].said
    else:
        assert "/checkpoints_0/step_0000000" in noted["checkpoint"]
        assert noted["steps_lost"] <= 2
        assert "continuing from local step_0000000" in started[0].said
    assert machines.result() == whole.result()
    assert list((machines.home / "local").iterdir()) == []


def _holding(held: Path) -> Callable[[], None]:
    """Return a patch by which a rank that hangs says so, and waits until its launcher ends."""

    def patch() -> None:
        from mtrain.world import faults

        def act() -> None:
            # Once: the step of a rank that ended without a record is not known to the restart.
            if not held.exists():
                held.touch()
                faults._hang()

        faults.KINDS["hang"] = faults.Kind(faults.FORWARD, act)

    return patch


REPLICATED = (
    *TO_THE_END,
    "cluster.nodes=2",
    "checkpoint.local_interval=1",
    "checkpoint.local_dir=local",
    "checkpoint.local_replicas=1",
    "--restarts",
    "1",
)


def _losing(machines: Machines, lost: int) -> list[Launched]:
    """Start a run whose step 6 waits, with copies of all parts of step 5; then kill the launcher of
    a machine, and delete all that it held.
    """
    held = machines.home / "held"
    started = machines.every(*REPLICATED, "--inject", "hang@6:1", patch=_holding(held))
    local = machines.home / "local"
    wait_for(held.exists)
    wait_for(lambda: len(list(local.glob("*/replica_*/step_00000005"))) == 2)
    os.kill(started[lost].pid, signal.SIGKILL)
    for one in [*local.glob(f"*/checkpoints_{lost}"), *local.glob(f"*/replica_*_on_{lost}")]:
        shutil.rmtree(one)
    return started


@pytest.mark.full
def test_machines_lost_disk_is_made_up_by_a_replica(
    machines: Machines, undisturbed: dict[str, Any]
) -> None:
    started = _losing(machines, 1)
    again = _holding(machines.home / "held")
    started[1] = machines.start(1, *REPLICATED, "--inject", "hang@6:1", patch=again)
    assert [one.wait() for one in started] == [0, 0], [one.said for one in started]
    (noted,) = machines.restarts()
    assert "/checkpoints_0/step_00000005" in noted["checkpoint"]
    assert noted["steps_lost"] == 0
    assert "lacks its part of local step 5: copied from machine 0" in started[0].said
    assert not any("not copied" in one.said for one in started)
    assert machines.result() == undisturbed
    assert list((machines.home / "local").iterdir()) == []


@pytest.mark.full
def test_machines_new_first_machine_gets_its_part_back(
    machines: Machines, undisturbed: dict[str, Any]
) -> None:
    assert _losing(machines, 0)[1].wait(30) == 5
    started = machines.every(*REPLICATED, "checkpoint.resume=latest")
    assert [one.wait() for one in started] == [0, 0], [one.said for one in started]
    assert "machine 0 lacks its part of local step 5: copied from machine 1 (" in started[0].said
    assert machines.result() == undisturbed
    assert list((machines.home / "local").iterdir()) == []


THIRDS = (
    *(word for word in TO_THE_END if not word.startswith("parallel")),
    "parallel=dp3",
    "trainer.global_batch_size=6",
)


@pytest.mark.full
def test_machines_two_of_three_lost_get_their_parts_back(tmp_path: Path) -> None:
    whole = Machines(tmp_path / "whole")
    whole.home.mkdir()
    assert mtrain(*THIRDS, cwd=whole.home).returncode == 0
    machines = Machines(tmp_path / "three", 3)
    machines.home.mkdir()
    replicated = (*THIRDS, *REPLICATED[len(TO_THE_END) :])
    words = [word.replace("=2", "=3") if "nodes" in word else word for word in replicated]
    words[words.index("checkpoint.local_replicas=1")] = "checkpoint.local_replicas=2"
    held = machines.home / "held"
    try:
        started = machines.every(*words, "--inject", "hang@6:1", patch=_holding(held))
        wait_for(held.exists)
        local = machines.home / "local"
        wait_for(lambda: len(list(local.glob("*/replica_*/step_00000005"))) == 6)
        for lost in (1, 2):
            os.kill(started[lost].pid, signal.SIGKILL)
            mine = local.glob(f"*/checkpoints_{lost}")
            for one in [*mine, *local.glob(f"*/replica_*_on_{lost}")]:
                shutil.rmtree(one)
        for lost in (1, 2):
            started[lost] = machines.start(
                lost, *words, "--inject", "hang@6:1", patch=_holding(held)
            )
        assert [one.wait() for one in started] == [0, 0, 0], [one.said for one in started]
        (noted,) = machines.restarts()
        assert noted["steps_lost"] == 0
        copied = "lacks its part of local step 5: copied from machine"
        assert started[0].said.count(copied) == 2, started[0].said
        assert machines.result() == whole.result()
        assert list(local.iterdir()) == []
    finally:
        for launched in machines.all:
            launched.kill()


@pytest.mark.full
def test_machines_killed_replication_goes_on_in_the_run(machines: Machines) -> None:
    words = [
        word for word in REPLICATED if not word.startswith(("trainer.train", "checkpoint.sav"))
    ]
    words += ["trainer.train_iters=100000", "checkpoint.save_interval=100000"]
    started = machines.every(*words)
    local = machines.home / "local"

    def newest() -> list[int]:
        """Return the newest step of each machine's copy of the other's part."""
        steps: dict[str, int] = {}
        for path in local.glob("*/replica_*/step_*"):
            own = steps.setdefault(path.parent.name, 0)
            steps[path.parent.name] = max(own, int(path.name.removeprefix("step_")))
        return sorted(steps.values())

    wait_for(lambda: len(newest()) == 2)
    killed = 0
    for launcher in started:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            # It works in a child of its own, which another one follows.
            if "mtrain.ckpt.replication.process" in child.cmdline() and not child.children():
                child.kill()
                killed += 1
    before = newest()
    assert killed == 2
    wait_for(lambda: len(newest()) == 2 and newest()[0] > before[-1] + 1)
    os.kill(started[0].pid, signal.SIGTERM)
    assert [one.wait() for one in started] == [75, 75], [one.said for one in started]
    for one in started:
        said = "the process that copies local checkpoints ended with SIGKILL; another goes on"
        assert one.said.count(said) == 1


def _stepping(machines: Machines, started: list[Launched], steps: int = 3) -> None:
    def reached() -> bool:
        ended = any(one.poll() is not None for one in started)
        return ended or len(metrics(machines.run)) > steps

    wait_for(reached)
    assert all(one.poll() is None for one in started), [one.said for one in started]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_machines_lost_launcher_is_named_by_the_other(lost: int, machines: Machines) -> None:
    started = machines.every(*ENDLESS)
    _stepping(machines, started)
    ranks = [rank for one in started for rank in one.ranks()]
    assert len(ranks) == 2
    os.kill(started[lost].pid, signal.SIGKILL)
    other = started[1 - lost]
    assert other.wait(30) == 5, other.said
    assert f"machine {lost} (" in other.said
    assert "is lost: its launcher has ended" in other.said
    _, alive = psutil.wait_procs(ranks, timeout=patient(30))
    assert not alive


@pytest.mark.full
def test_machines_replaced_launcher_joins_the_next_attempt(
    machines: Machines, undisturbed: dict[str, Any]
) -> None:
    held = machines.home / "held"
    words = [*TO_THE_END, "--restarts", "1"]
    started = machines.every(*words, "--inject", "hang@4:1", patch=_holding(held))
    wait_for(held.exists)
    os.kill(started[1].pid, signal.SIGKILL)
    again = machines.start(1, *words, "--inject", "hang@4:1", patch=_holding(held))
    assert [started[0].wait(), again.wait()] == [0, 0], (started[0].said, again.said)
    (noted,) = machines.restarts()
    assert (noted["rank"], noted["kind"]) == (1, "machine lost")
    assert "ranks 1 to 1) is lost" in started[0].said
    assert machines.result() == undisturbed


@pytest.mark.full
def test_machines_lost_launcher_without_successor_ends_run(machines: Machines) -> None:
    started = machines.every(*ENDLESS, "--restarts", "1", "trainer.join_timeout_s=2")
    _stepping(machines, started)
    os.kill(started[1].pid, signal.SIGKILL)
    assert started[0].wait(60) == 5, started[0].said
    assert "not restarted: no other launcher came within 2 s" in started[0].said


@pytest.mark.full
def test_machines_stop_of_one_saves_and_ends_both(machines: Machines) -> None:
    started = machines.every(*ENDLESS, "--restarts", "1")
    _stepping(machines, started)
    os.kill(started[1].pid, signal.SIGTERM)
    assert [one.wait(60) for one in started] == [75, 75], [one.said for one in started]
    assert list((machines.run / "checkpoints").glob("step_*/manifest.json"))
    assert not machines.restarts()


@pytest.mark.parametrize(
    ("words", "more", "code", "text"),
    [
        (("parallel=dp3",), (), 3, "the layout has 3 ranks"),
        ((), ("optim.lr=0.5",), 3, "optim.lr=0.5 and "),
    ],
    ids=["undivided", "different"],
)
def test_machines_refused_run_ends_all(
    words: tuple[str, ...], more: tuple[str, ...], code: int, text: str, machines: Machines
) -> None:
    given = [*TO_THE_END, *words]
    started = [machines.start(0, *given), machines.start(1, *given, *more)]
    assert [one.wait() for one in started] == [code, code], [one.said for one in started]
    assert all(text in one.said for one in started)
    assert not machines.run.exists()
