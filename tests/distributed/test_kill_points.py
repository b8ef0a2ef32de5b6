"""A run that is killed between any two calls of a writer to the system: the newest checkpoint is
whole, at most one interval is lost, and the next start leaves nothing behind.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt.folder import step_of
from mtrain.ckpt.local import begin, exist, forget_after, newest
from mtrain.config.compose.paths import CHECKPOINTS
from tests.distributed.test_background_saves import STEPS, files_of, fit, of
from tests.faults.promises import Record, measured
from tests.support import faulty_writer
from tests.support.forked import RankFailed, run_alone, run_ranks

RANKS = 2
EVERY = 2
"""Steps between saves."""
VICTIMS = ("writer", "rank", "launcher")
COUNT = 200
LOCAL_COUNT = 9
SEED = 32
BATCHES = 10


def killed(folder: Path, victim: str, rank: int, at: int, *, local: bool = False) -> str:
    """Train in processes of their own, of which one is killed; return how the run ended.

    `local`: only local checkpoints are made, in a folder as a run has it.
    """
    folder.mkdir()
    home = folder / "run"
    if local:
        home.mkdir()
        begin(home, None, str(folder / "local"))

    def before() -> None:
        from mtrain.processes import die_with

        die_with(os.getppid())
        faulty_writer.use("kill", at, rank, victim=victim, counted=folder / "calls")

    def launcher() -> str:
        checkpoint: dict[str, Any] = {"async_save": True, "keep": 1, "barrier_timeout_s": 3.0}
        root = folder / "checkpoints"
        if local:
            checkpoint |= {"local_dir": str(folder / "local"), "local_interval": EVERY}
            checkpoint |= {"save_interval": 0}
            root = home / CHECKPOINTS
        run = of({"ranks": RANKS}, **checkpoint)
        try:
            ends = run_ranks(RANKS, fit, run, root, before)
        except RankFailed as error:
            return f"RankFailed: {error}"
        return ends[0][2] or "whole"

    try:
        return str(run_alone(launcher))
    except RankFailed:
        return "launcher killed"


def begun_saves(root: Path) -> int:
    """Return the step of the newest checkpoint or draft in a folder; 0 if it has none."""
    names = [path.name.removeprefix(".saving-").partition(".")[0] for path in root.glob("*step_*")]
    return max(
        (int(name.removeprefix("step_")) for name in names if name[:5] == "step_"), default=0
    )


def gone(folder: Path) -> None:
    """Wait until the writers of a killed run have ended."""
    deadline = time.monotonic() + 10
    while faulty_writer.running(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert faulty_writer.running(folder) == []


def check(folder: Path) -> float:
    """Check what a killed run has left, and what the next one leaves of it; return the intervals
    between the newest save that had begun and the newest one that loads.
    """
    from mtrain.ckpt.folder import committed
    from mtrain.ckpt.store import Checkpoint

    gone(folder)
    root = folder / "checkpoints"
    found = committed(root)
    newest = Checkpoint.open(found[-1]).step if found else 0
    lost = begun_saves(root) - newest
    assert lost <= EVERY
    run = of({"ranks": RANKS}, async_save=True, save_interval=STEPS)
    assert not any(error for _, _, error in run_ranks(RANKS, fit, run, root))
    assert all(name.startswith("step_") for name in files_of(root))
    return lost / EVERY


def cases(calls: dict[int, int], count: int) -> list[tuple[str, int, int]]:
    """Return seeded points: victim, rank of the writer, and its call."""
    draw = random.Random(SEED)
    found = []
    for number in range(count):
        rank = number % RANKS
        found.append((VICTIMS[number // RANKS % len(VICTIMS)], rank, draw.randint(1, calls[rank])))
    return found


def counted(folder: Path) -> dict[int, int]:
    """Return the calls of each rank's writer in a run that nobody kills."""
    calls = {}
    for rank in range(RANKS):
        place = folder / f"whole_{rank}"
        assert killed(place, "writer", rank, 0) == "whole"
        calls[rank] = int((place / "calls").read_text())
    return calls


@pytest.mark.full
@pytest.mark.parametrize("batch", range(BATCHES))
def test_kill_points_lose_at_most_one_interval(
    batch: int, tmp_path: Path, record_property: Record
) -> None:
    calls = counted(tmp_path)
    assert min(calls.values()) > 20
    points = cases(calls, COUNT)[batch::BATCHES]
    lost = 0.0
    for number, (victim, rank, at) in enumerate(points):
        place = tmp_path / str(number)
        assert killed(place, victim, rank, at) != "whole", (victim, rank, at)
        lost = max(lost, check(place))
    measured(record_property, kill_points=len(points), intervals_lost=lost)


@pytest.mark.full
def test_kill_points_of_local_checkpoints_leave_a_whole_one(
    tmp_path: Path, record_property: Record
) -> None:
    place = tmp_path / "whole"
    assert killed(place, "writer", 0, 0, local=True) == "whole"
    assert list((place / "local").iterdir()) == []
    calls = int((place / "calls").read_text())
    draw = random.Random(SEED)
    lost = 0.0
    for number in range(LOCAL_COUNT):
        victim = VICTIMS[number % len(VICTIMS)]
        at = draw.randint(1, calls * 2 // 3)
        place = tmp_path / f"{number}_{at}"
        # A local checkpoint is left out while the one before is being written, so a slow machine
        # makes fewer calls: a run that did not reach its point is killed at an earlier one.
        while killed(place, victim, 0, at, local=True) == "whole":
            reached = int((place / "calls").read_text())
            assert 0 < reached < at, (victim, at)
            at = draw.randint(1, reached * 2 // 3)
            place = tmp_path / f"{number}_{at}"
        gone(place)
        home = place / "run"
        (root,) = (place / "local").glob(f"*/{CHECKPOINTS}")
        begun = begun_saves(root)
        notes: list[str] = []
        found = newest(home, 0, notes)
        assert notes == []
        assert begun - (step_of(found) if found else 0) <= EVERY
        forget_after(home, step_of(found) if found else 0)
        assert [path.name for path in root.iterdir()] == ([found.name] if found else [])
        assert exist(home) == (found is not None)
        lost = max(lost, (begun - (step_of(found) if found else 0)) / EVERY)
    measured(record_property, kill_points=LOCAL_COUNT, intervals_lost=lost)
