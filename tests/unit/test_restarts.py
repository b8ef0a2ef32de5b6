"""Decisions about restarts, without ranks: how many, from where, and which error is raised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.config.compose.paths import CHECKPOINTS, MANIFEST
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import MtrainError, TrainingError
from mtrain.launching.restart import RESTARTS, Attempts, Memory
from mtrain.launching.supervise import Failure
from mtrain.world import faults
from mtrain.world.heartbeat import heartbeat
from tests.support.configs import LAPTOP, tiny

MINUTE = 60.0


def failure(text: str, step: int, rank: int = 0) -> Failure:
    return Failure(rank, "RuntimeError", text, TrainingError(text), step, restart_helps=True)


@pytest.fixture
def attempts(tmp_path: Path) -> Callable[..., Attempts]:
    """Return a function that makes the attempts of a run in a new folder; their clock is a list."""

    def made(now: list[float] | None = None, **keys: object) -> Attempts:
        given = {f"resilience__{name}": value for name, value in keys.items()}
        run = resolve(tiny(**given), LAPTOP)
        times = now or [0.0]
        said: list[str] = []
        found = Attempts(run, tmp_path, None, None, said.append, clock=lambda: times[0])
        found.said = said  # type: ignore[attr-defined]
        return found

    return made


def reach(home: Path, step: int) -> None:
    """Note a step as `metrics.jsonl` has it."""
    with (home / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "lr": 0.1}) + "\n")


def test_restarts_end_at_their_number(attempts: Callable[..., Attempts]) -> None:
    some = attempts(restarts=2)
    for step in (1, 2):
        reach(some.home, step)
        some.prepare(failure(f"fault in step {step + 1}", step + 1))
    reach(some.home, 3)
    with pytest.raises(TrainingError) as refused:
        some.prepare(failure("the last fault", 4))
    assert str(refused.value).splitlines() == [
        "the last fault",
        "  not restarted: all 2 restarts (resilience.restarts) are used",
    ]


def test_restarts_without_a_new_step_end_with_first_error(
    attempts: Callable[..., Attempts],
) -> None:
    some = attempts(restarts=10)
    reach(some.home, 4)
    for text in ("the cause", "another", "a third"):
        some.prepare(failure(text, 5))
    with pytest.raises(TrainingError) as refused:
        some.prepare(failure("a fourth", 5))
    assert str(refused.value).splitlines() == [
        "the cause",
        "  not restarted: 3 restarts made no step after step 4",
    ]


def test_restarts_count_again_after_a_new_step(attempts: Callable[..., Attempts]) -> None:
    some = attempts(restarts=10)
    for step in (4, 4, 4, 5, 5, 5):
        reach(some.home, step)
        some.prepare(failure("a fault", step + 1))
    assert len(some.times) == 6
    with pytest.raises(TrainingError, match="made no step after step 5"):
        some.prepare(failure("a fault", 6))


def test_restarts_window_forgets_old_ones(attempts: Callable[..., Attempts]) -> None:
    now = [0.0]
    some = attempts(now, restarts=2, restart_window=10.0)
    for step, minutes in enumerate((0, 4, 11, 15), start=1):
        now[0] = minutes * MINUTE
        reach(some.home, step)
        some.prepare(failure("a fault", step + 1))
    reach(some.home, 5)
    with pytest.raises(TrainingError, match=r"all 2 restarts .* within 10 minutes are used"):
        some.prepare(failure("a fault", 6))


def test_restarts_continue_from_newest_committed(attempts: Callable[..., Attempts]) -> None:
    some = attempts(restarts=1)
    for step in (4, 8):
        folder = some.home / CHECKPOINTS / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).touch()
    (some.home / CHECKPOINTS / ".saving-step_00000012").mkdir()
    (some.home / "errors").mkdir()
    (some.home / "errors/rank_00001.json").touch()
    reach(some.home, 11)
    some.prepare(failure("rank 1 was ended by SIGKILL", 12, rank=1))
    assert some.checkpoint == some.home / CHECKPOINTS / "step_00000008"
    assert not (some.home / CHECKPOINTS / ".saving-step_00000012").exists()
    line = json.loads((some.home / RESTARTS).read_text())
    assert line.pop("time").endswith("Z")
    assert line == {
        "restart": 1,
        "of": 1,
        "rank": 1,
        "kind": "RuntimeError",
        "error": "rank 1 was ended by SIGKILL",
        "step": 12,
        "checkpoint": "checkpoints/step_00000008",
        "steps_lost": 3,
        "records": "errors/restart_1",
        "in_process": False,
    }
    assert (some.home / "errors/restart_1/rank_00001.json").is_file()
    assert some.said == [  # type: ignore[attr-defined]
        "restart 1 of 1: rank 1 was ended by SIGKILL (step 12); continuing from step_00000008, 3"
        " steps lost"
    ]


def test_restarts_count_those_of_another_process(attempts: Callable[..., Attempts]) -> None:
    ranks = attempts(restarts=3)
    launcher = attempts(restarts=3)
    reach(ranks.home, 4)
    memory = Memory([3 << 30, 1 << 30], [2 << 30, 1 << 30], [0, 2])
    ranks.prepare(failure("the cause", 5, rank=1), memory)
    assert ranks.said == [  # type: ignore[attr-defined]
        "restart 1 of 3: the cause (step 5); continuing from the beginning, 4 steps lost, in the"
        " same processes (memory of rank 0: 3.0 GiB, now 2.0 GiB); 2 objects of the model could"
        " not be released"
    ]
    noted = json.loads((ranks.home / RESTARTS).read_text())
    assert (noted["in_process"], noted["survivors"]) == (True, [0, 2])
    launcher.prepare(failure("rank 0 was ended by SIGKILL", 5))
    assert [line.text for line in launcher.futile] == ["the cause", "rank 0 was ended by SIGKILL"]
    # the ranks of the next start, which know nothing
    later = attempts(restarts=3)
    later.prepare(failure("a third", 5), memory)
    assert [json.loads(line)["restart"] for line in lines(later.home)] == [1, 2, 3]
    with pytest.raises(TrainingError, match="3 restarts made no step after step 4") as refused:
        launcher.prepare(failure("a fourth", 5))
    assert str(refused.value).startswith("the cause\n")


def lines(home: Path) -> list[str]:
    return (home / RESTARTS).read_text().splitlines()


def test_restarts_begin_with_imported_weights_as_weights(
    attempts: Callable[..., Attempts],
) -> None:
    some = attempts(restarts=2)
    some.weights = some.home / CHECKPOINTS / "step_00000000"
    some.weights.mkdir(parents=True)
    (some.weights / MANIFEST).touch()
    some.prepare(failure("a fault", 1))
    assert some.checkpoint is None
    assert json.loads((some.home / RESTARTS).read_text())["checkpoint"] is None


def test_restarts_off_raise_the_error_itself(attempts: Callable[..., Attempts]) -> None:
    some = attempts()
    cause = failure("a fault", 3)
    with pytest.raises(MtrainError) as refused:
        some.prepare(cause)
    assert refused.value is cause.error
    assert not (some.home / RESTARTS).exists()


def test_restarts_injected_faults_happen_once_unless_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = faults.parse("kill@3,always:raise@3:1,slow@1:3,exit@9:2")
    left = ["always:raise@3:1", "slow@1:3", "exit@9:2"]
    assert [str(fault) for fault in faults.left(some, 3)] == left
    for text in ("kill", "kill@0", "melt@3", "kill@3:", "kill@3,"):
        with pytest.raises(ValueError, match="is no fault; faults are kill, "):
            faults.parse(text)
    monkeypatch.setattr(faults, "_armed", [])
    monkeypatch.setattr(heartbeat, "step", 3)
    faults.arm(map(str, some), rank=1)
    faults.reach(faults.BACKWARD)
    with pytest.raises(RuntimeError, match="injected fault"):
        faults.reach(faults.FORWARD)
    monkeypatch.setattr(heartbeat, "step", 4)
    faults.reach(faults.FORWARD)
