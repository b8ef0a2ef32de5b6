"""The account of a run's life: each second has one cause, whatever was killed, torn or moved."""

from __future__ import annotations

import fcntl
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mtrain import startup
from mtrain.cli.main import main
from mtrain.errors import Preempted
from mtrain.goodput import log as life_log
from mtrain.goodput.account import Account, account, attempts_of, furthest, write
from mtrain.goodput.log import (
    BEGIN,
    END,
    FAILED,
    FINISHED,
    LAUNCHER_END,
    LOG,
    SIGN,
    STOPPED,
    Begun,
    LifeLog,
    facts_of,
    pause_s,
    scheduled,
)
from mtrain.goodput.meter import (
    CAUSES,
    DOWN,
    EVALUATING,
    LOADING,
    QUEUED,
    RECOMPUTING,
    SAVING,
    STARTING,
    STEPPING,
    WAITING,
    Meter,
)

HOUR = 3600.0


@dataclass
class Clocks:
    """The clocks of machines: `true` never jumps; they stand in for the module `time`."""

    true: float = 1000.0
    wall: float = 1.7e9
    """Wall clock minus true time."""
    boots: float = 0.0
    """True time minus the monotonic clock."""

    def time(self) -> float:
        return self.true + self.wall

    def monotonic(self) -> float:
        return self.true - self.boots


@dataclass
class Life:
    """A run that writes its log while the clocks move."""

    home: Path
    clocks: Clocks = field(default_factory=Clocks)
    boot: str = "one"
    step: int = 0
    lines: list[tuple[float, float]] = field(default_factory=list)
    """True time of each line, and of the beginning of its attempt."""

    def begin(self, **facts: Any) -> None:
        """Begin an attempt now."""
        self.began = self.clocks.true
        start = startup.Startup(self.clocks.monotonic(), [])
        self.meter = Meter(start, furthest(self.home), self.clocks.monotonic)
        self.meter.cause = STARTING
        begun = Begun(
            f"{self.clocks.true:.4f}", self.clocks.time(), self.boot, self.clocks.monotonic()
        )
        self.log = LifeLog(self.home, begun)
        self.facts = facts

    def write(self, kind: str, **facts: Any) -> None:
        """Append a line now."""
        own = facts_of(self.meter.sign()) if kind != LAUNCHER_END else {}
        elapsed = {"elapsed_s": self.clocks.true - self.began} if kind == LAUNCHER_END else {}
        self.log.append(kind, {**own, **elapsed, **facts})
        self.lines.append((self.clocks.true, self.began))

    def load(self, step: int, seconds: float = 1.0) -> None:
        """Load the state of `step`, from the first line on."""
        self.write(BEGIN, **self.facts)
        self.meter.enter(LOADING)
        self.clocks.true += seconds
        self.meter.loaded(step)
        self.step = step

    def make(self, steps: int = 1, seconds: float = 1.0, waited: float = 0.0) -> None:
        """Make steps."""
        for _ in range(steps):
            self.clocks.true += seconds
            self.step += 1
            self.meter.stepped(self.step, waited)

    def tear(self, dice: random.Random) -> None:
        """Lose a part of the last line."""
        path = self.home / LOG
        data = path.read_bytes()
        last = len(data.rstrip(b"\n").rpartition(b"\n")[2])
        path.write_bytes(data[: len(data) - dice.randrange(2, last)])
        self.lines.pop()


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    life = Life(tmp_path)
    monkeypatch.setattr(life_log, "time", life.clocks)
    return life


def spent(found: Account) -> dict[str, float]:
    return {cause: round(seconds, 3) for cause, seconds in found.seconds.items() if seconds > 5e-4}


def test_goodput_meter_charges_each_second_of_a_loop_once() -> None:
    clocks = Clocks()
    meter = Meter(clock=clocks.monotonic)
    clocks.true += 7
    meter.loaded(0)
    for step, seconds in enumerate((10.0, 3.0, 2.0, 2.0), 1):
        clocks.true += seconds
        meter.stepped(step, 0.5)
        with meter.charging(SAVING):
            clocks.true += 4
            with meter.charging(EVALUATING):
                clocks.true += 1
    clocks.true += 0.25
    meter.over()
    sign = meter.sign()
    # the first step took 9.5 s without its wait, the slower of the next two 2.5 s
    assert {cause: s for cause, s in sign.seconds.items() if s} == {
        STEPPING: 17 - 4 * 0.5 - 7 + 0.25,
        WAITING: 2.0,
        LOADING: 7 + 7,
        SAVING: 16.0,
        EVALUATING: 4.0,
    }
    assert sign.open_s == 0
    assert sum(sign.seconds.values()) == sign.elapsed_s


def test_goodput_lost_steps_recompute_and_cut_off_step_is_down(life: Life) -> None:
    life.begin()
    life.clocks.true += 2
    life.load(0)
    life.make(20)
    life.clocks.true += 30  # a step that hangs
    life.write(SIGN)
    life.clocks.true += 5
    life.write(LAUNCHER_END, end=FAILED, why="rank 1 was ended by SIGKILL")
    life.clocks.true += 10
    life.begin()
    life.load(12, 3)
    life.make(18, waited=0.25)
    life.meter.over()
    life.write(END, end=FINISHED)
    found = account(life.home)
    assert spent(found) == {
        STEPPING: 20 + 7.5,
        WAITING: 2.5,
        RECOMPUTING: 8.0,
        LOADING: 4.0,
        STARTING: 2.0,
        DOWN: 30 + 5 + 10,
    }
    assert found.wall_s == pytest.approx(life.clocks.true - 1000)
    rows = found.report()["attempts"]
    assert [(r["first_step"], r["step"], r["steps_again"], r["end"]) for r in rows] == [
        (0, 20, 0, FAILED),
        (12, 30, 8, FINISHED),
    ]
    assert found.line().startswith("goodput 30.9% of 1m29s in 2 attempts; down 50.6%, recomputing")


def _simulated(life: Life, dice: random.Random, *, one_machine: bool) -> None:
    """Live through attempts that end in any way, at any moment."""
    clocks = life.clocks
    for number in range(dice.randrange(1, 6)):
        if number and not one_machine:
            life.boot = f"boot {number}"
            clocks.boots = clocks.true - dice.uniform(10, 1e6)
        life.begin()
        clocks.true += dice.uniform(0, 3)
        if dice.random() < 0.1:
            life.write(LAUNCHER_END, end=FAILED, why="no rank came")
            continue
        life.load(dice.randrange(life.step + 1), dice.uniform(0, 3))
        for _ in range(dice.randrange(30)):
            what = dice.random()
            if what < 0.6:
                seconds = dice.uniform(0.001, 2)
                life.make(1, seconds, waited=dice.uniform(0, 1.5 * seconds))
            elif what < 0.8:
                with life.meter.charging(dice.choice([SAVING, EVALUATING])):
                    clocks.true += dice.uniform(0, 5)
                    if dice.random() < 0.3:
                        life.write(SIGN)
            elif what < 0.9:
                clocks.true += dice.uniform(0, 0.5)
                life.write(SIGN)
            elif one_machine:
                clocks.wall += dice.choice([-HOUR, HOUR, 0.3])
        how = dice.choice([STOPPED, FAILED, "killed"])
        clocks.true += dice.uniform(0, 2)
        if how != "killed":
            life.meter.over() if how == STOPPED else life.meter.fail()
            clocks.true += dice.uniform(0, 2)
            life.write(END, end=how)
        if dice.random() < 0.5:
            clocks.true += dice.uniform(0, 2)
            life.write(LAUNCHER_END, end=FAILED if how == "killed" else how)
        if dice.random() < 0.3:
            life.tear(dice)
        clocks.true += dice.uniform(0, 100)
        clocks.wall += dice.choice([-HOUR, 0, HOUR]) if one_machine else 0


@pytest.mark.parametrize("one_machine", [True, False])
def test_goodput_causes_add_up_to_the_wall_clock(
    one_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(150):
        home = tmp_path / str(seed)
        home.mkdir()
        life = Life(home)
        monkeypatch.setattr(life_log, "time", life.clocks)
        _simulated(life, random.Random(seed), one_machine=one_machine)
        if not life.lines:
            assert attempts_of(home / LOG) == []
            continue
        found = account(home)
        lived = life.lines[-1][0] - life.lines[0][1]
        assert found.wall_s == pytest.approx(lived, abs=0.02), seed
        assert all(s >= 0 for one in found.attempts for s in one.seconds.values()), seed
        assert all(s >= 0 for one in found.attempts for s in one.before.values()), seed
        assert set(found.seconds) == set(CAUSES)


def test_goodput_clock_put_back_between_machines_is_no_time(life: Life) -> None:
    life.begin()
    life.load(0)
    life.make(4)
    life.write(SIGN)
    life.boot = "another"
    life.clocks.wall -= HOUR
    life.clocks.true += 60
    life.begin()
    life.load(0)
    life.write(END, end=STOPPED)
    found = account(life.home)
    assert [one.before for one in found.attempts] == [{}, {QUEUED: 0, STARTING: 0, DOWN: 0}]
    assert found.wall_s == pytest.approx(6)


def test_goodput_overlap_on_one_machine_counts_once(life: Life) -> None:
    life.begin()
    life.load(0)
    life.make(10)
    first = life.meter, life.log, life.began
    life.begin()  # while the processes of the first attempt still end
    life.clocks.true += 5
    second = life.meter, life.log, life.began
    life.meter, life.log, life.began = first
    life.write(END, end=FAILED)
    life.meter, life.log, life.began = second
    life.clocks.true += 1
    life.load(0)
    life.meter.over()
    life.write(END, end=STOPPED)
    stale = json.loads((life.home / LOG).read_text().splitlines()[0])
    with (life.home / LOG).open("a") as file:
        file.write(json.dumps({**stale, "elapsed_s": 900.0, "at": stale["at"] + 900}) + "\n")
    found = account(life.home)
    assert found.wall_s == pytest.approx(life.clocks.true - 1000)
    assert found.attempts[1].seconds[STARTING] == pytest.approx(1)


def test_goodput_time_after_a_finished_run_is_not_life(life: Life) -> None:
    life.begin()
    life.load(0)
    life.make(4)
    life.meter.over()
    life.write(END, end=FINISHED)
    life.clocks.true += 100 * HOUR
    life.begin()
    life.load(4)
    life.make(4)
    life.write(END, end=FINISHED)
    found = account(life.home)
    assert found.wall_s == pytest.approx(10)
    assert found.step == 8


def test_goodput_run_that_never_stepped_is_zero(life: Life) -> None:
    life.begin()
    life.clocks.true += 3
    life.write(BEGIN)
    life.clocks.true += 1
    life.write(LAUNCHER_END, end=FAILED, why="x")
    found = account(life.home)
    assert (found.goodput, found.step) == (0, 0)
    assert found.report()["attempts"][0]["first_step"] is None
    assert spent(found) == {STARTING: 3.0, DOWN: 1.0}


JOB = {"SLURM_JOB_START_TIME": "1700001600", startup.SUBMITTED: "1700001500"}
QUEUES: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "no scheduler": ({}, {QUEUED: 0, STARTING: 0, DOWN: 720}),
    "requeued": ({**JOB, "SLURM_RESTART_COUNT": "1"}, {QUEUED: 600, STARTING: 120, DOWN: 0}),
    "submitted": (JOB, {QUEUED: 100, STARTING: 120, DOWN: 500}),
    "job with other work": (
        {"SLURM_JOB_START_TIME": JOB["SLURM_JOB_START_TIME"]},
        {QUEUED: 0, STARTING: 0, DOWN: 720},
    ),
    "clock of the future": (
        {"SLURM_JOB_START_TIME": "1900000000", "SLURM_RESTART_COUNT": "2"},
        {QUEUED: 720, STARTING: 0, DOWN: 0},
    ),
    "no numbers": (
        {"SLURM_JOB_START_TIME": "soon", startup.SUBMITTED: "nan", "SLURM_RESTART_COUNT": "x"},
        {QUEUED: 0, STARTING: 0, DOWN: 720},
    ),
}


@pytest.mark.parametrize("name", QUEUES)
def test_goodput_gap_is_queued_as_far_as_scheduler_tells(name: str, life: Life) -> None:
    environment, expected = QUEUES[name]
    life.clocks.true = 0
    life.clocks.wall = 1_700_000_990.0
    life.begin()
    life.load(0, 5)
    life.make(5)
    life.write(SIGN)  # at 1700001000
    life.clocks.true += 720
    life.boot = "another"
    life.begin(**scheduled(environment))
    life.load(5)
    assert account(life.home).attempts[1].before == pytest.approx(expected)


def test_goodput_first_queue_of_a_submitted_job_is_life(life: Life) -> None:
    life.clocks.wall = 1_700_000_700.0
    life.begin(**scheduled(JOB))
    life.load(0)
    assert account(life.home).attempts[0].before == {QUEUED: 100, STARTING: 100}


DAMAGE = {
    "no JSON": b"\xff\x00\n",
    "a list": b"[1]\n",
    "no seconds": {"seconds": None},
    "unknown cause": {"seconds": {"asleep": 1}},
    "negative": {"seconds": {STEPPING: -1}},
    "true": {"elapsed_s": True},
    "huge": {"at": 1e300},
    "not a number": {"open_s": float("nan")},
    "no boot": {"boot": 3},
    "newer": {"format": 2},
    "deep": b"[" * 60_000 + b"\n",
    "long": b'{"format": 1' + b" " * 200_000 + b"}\n",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_goodput_damaged_lines_are_left_out(name: str, life: Life) -> None:
    life.begin()
    life.load(0)
    life.make(3)
    life.write(SIGN)
    path = life.home / LOG
    whole = path.read_bytes()
    expected = account(life.home).report()
    damage = DAMAGE[name]
    if isinstance(damage, dict):
        line = json.loads(whole.splitlines()[-1]) | {"elapsed_s": 50.0}
        damage = json.dumps(line | damage).encode() + b"\n"
    path.write_bytes(damage + whole + damage)
    assert account(life.home).report() == expected


def test_goodput_line_after_a_torn_one_is_whole(life: Life) -> None:
    life.begin()
    life.load(0)
    life.make(3)
    life.write(SIGN)
    life.tear(random.Random(1))
    life.make(3)
    life.write(SIGN)
    assert account(life.home).step == 6


def test_goodput_recorded_attempt_ends_with_its_reason(tmp_path: Path) -> None:
    endings: list[tuple[BaseException | None, bool]] = [
        (None, False),
        (Preempted("stopped"), False),
        (ValueError("bad"), False),
        (ValueError("sample"), True),
    ]
    for error, done in endings:
        meter = Meter()
        try:
            with life_log.recorded(tmp_path, meter, {}):
                meter.loaded(0)
                meter.done = done
                if error is not None:
                    raise error
        except (Preempted, ValueError):
            pass
    ends = [(one.end, one.why) for one in attempts_of(tmp_path / LOG)]
    assert ends == [(FINISHED, ""), (STOPPED, ""), (FAILED, "bad"), (FINISHED, "sample")]


def test_goodput_signs_come_while_the_main_thread_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_log, "SHORTEST_S", 0.01)
    meter = Meter()
    with life_log.recorded(tmp_path, meter, {}):
        meter.loaded(0)
        deadline = life_log.time.monotonic() + 20
        while b'"sign"' not in (tmp_path / LOG).read_bytes():
            assert life_log.time.monotonic() < deadline


def test_goodput_signs_are_bounded_in_number_and_loss() -> None:
    assert [pause_s(t) for t in (0, 50, 500, 1e9)] == [1, 1, 5, 60]


def test_goodput_log_not_writable_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with life_log.recorded(tmp_path / "gone", Meter(), {}):
        pass
    assert capsys.readouterr().err.count("life.jsonl cannot be written (No such file") == 1
    assert write(tmp_path / "gone") is None


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["goodput", *words]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_goodput_prints_a_live_run_so_far(life: Life, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(life.home)
    (life.home / "run.yaml").touch()
    life.begin()
    life.load(0)
    life.make(30)
    life.clocks.true += 9
    life.write(SIGN)
    with (life.home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        alive = json.loads(said(capsys, home, "--json"))
        assert "still going on" in said(capsys, home)
    assert (alive["state"], alive["seconds"][STEPPING], alive["wall_s"]) == ("running", 39, 40)
    dead = json.loads(said(capsys, home, "--json"))
    assert (dead["state"], dead["seconds"][STEPPING], dead["seconds"][DOWN]) == ("killed", 30, 9)
    page = said(capsys, home)
    assert "killed at step 30, 1 attempt\n" in page
    assert "  stepping  30.0s  75.0%" in page


def test_goodput_run_without_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "MT502" in said(capsys, str(tmp_path / "none"), code=2)
    assert "MT002" in said(capsys, "a", "b", code=2)
    (tmp_path / "run.yaml").touch()
    assert "MT460" in said(capsys, str(tmp_path), code=2)
    (tmp_path / LOG).write_bytes(b'{"half": ')
    assert "no line of it can be read" in said(capsys, str(tmp_path), code=4)
