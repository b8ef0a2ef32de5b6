"""A run that is killed between any two calls of a writer to the system: the newest checkpoint is
whole, at most one interval is lost, and the next start leaves nothing behind.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.distributed.test_background_saves import STEPS, files_of, fit, of
from tests.support import faulty_writer
from tests.support.forked import RankFailed, run_alone, run_ranks

RANKS = 2
EVERY = 2
"""Steps between saves."""
VICTIMS = ("writer", "rank", "launcher")
COUNT = 200
SEED = 32
BATCHES = 10


def killed(folder: Path, victim: str, rank: int, at: int) -> str:
    """Train in processes of their own, of which one is killed; return how the run ended."""
    folder.mkdir()

    def before() -> None:
        from mtrain.processes import die_with

        die_with(os.getppid())
        faulty_writer.use("kill", at, rank, victim=victim, counted=folder / "calls")

    def launcher() -> str:
        run = of({"ranks": RANKS}, async_save=True, keep=1, barrier_timeout_s=3.0)
        try:
            ends = run_ranks(RANKS, fit, run, folder / "checkpoints", before)
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


def check(folder: Path) -> None:
    """Check what a killed run has left, and what the next one leaves of it."""
    from mtrain.ckpt.folder import committed
    from mtrain.ckpt.store import Checkpoint

    deadline = time.monotonic() + 10
    while faulty_writer.running(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert faulty_writer.running(folder) == []
    root = folder / "checkpoints"
    found = committed(root)
    newest = Checkpoint.open(found[-1]).step if found else 0
    assert begun_saves(root) - newest <= EVERY
    run = of({"ranks": RANKS}, async_save=True, save_interval=STEPS)
    assert not any(error for _, _, error in run_ranks(RANKS, fit, run, root))
    assert all(name.startswith("step_") for name in files_of(root))


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
def test_kill_points_lose_at_most_one_interval(batch: int, tmp_path: Path) -> None:
    calls = counted(tmp_path)
    assert min(calls.values()) > 20
    for number, (victim, rank, at) in enumerate(cases(calls, COUNT)[batch::BATCHES]):
        place = tmp_path / str(number)
        assert killed(place, victim, rank, at) != "whole", (victim, rank, at)
        check(place)
