"""The checkpoints that stay: permanent ones, the best, and those that someone needs."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt import folder
from mtrain.ckpt.retention import Evaluations, Policy, losses_of, prune, retention
from mtrain.cli.main import main

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder with checkpoints of five steps, evaluated after 150, 200 and 400."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs/a"
    for step in STEPS:
        path = home / "checkpoints" / folder.folder_name(step)
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    evaluate(home, {150: 2.5, 200: 2.31, 400: 2.75})
    return home


def evaluate(home: Path, losses: dict[int, Any]) -> None:
    """Add lines of steps and of evaluations to the metrics of a run."""
    with (home / "metrics.jsonl").open("a") as file:
        for step, loss in losses.items():
            file.write(json.dumps({"step": step, "loss": 1.0, "lr": 0.1}) + "\n")
            file.write(json.dumps({"step": step, "valid_loss": loss, "valid_tokens": 8}) + "\n")


def left(home: Path) -> list[int]:
    """Return the steps of the checkpoints of a run."""
    return [folder.step_of(path) for path in folder.committed(home / "checkpoints")]


POLICIES = {
    "every": (Policy(1, every=200), [200, 400, 500]),
    "best": (Policy(1, best="valid_loss"), [200, 500]),
    "both": (Policy(2, every=300, best="valid_loss"), [200, 300, 400, 500]),
    "all": (Policy(None), list(STEPS)),
    "neither": (Policy(2), [400, 500]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_retention_run_keeps_permanent_and_best(name: str, home: Path) -> None:
    policy, steps = POLICIES[name]
    prune(home / "checkpoints", policy)
    assert left(home) == steps


def test_retention_checkpoint_counts_with_last_evaluation(home: Path) -> None:
    root = home / "checkpoints"
    every = folder.committed(root)
    policy = Policy(1, best="valid_loss")

    def best(losses: dict[int, float]) -> list[str]:
        found = retention(every, policy, complete=every, losses=losses)
        return [f"{kept.path.name[-3:]} {kept.why}" for kept in (*found.kept, *found.newest)]

    # 300 and 400 have the same loss: 300 is nearer to the evaluation
    assert best({150: 2.5, 250: 2.0, 450: 2.1})[0] == "300 best valid_loss 2 (of step 250)"
    # the newest is not evaluated yet, and no reason to delete an equal one
    assert best({400: 2.0})[0] == "400 best valid_loss 2"
    # nothing is known
    assert best({}) == ["500 one of the newest"]
    assert best({600: 1.0}) == ["500 one of the newest"]
    assert best({500: 1.0}) == ["500 one of the newest; best valid_loss 1"]


def test_retention_step_zero_is_not_permanent(home: Path) -> None:
    (home / "checkpoints" / folder.folder_name(100)).rename(home / "checkpoints/step_00000000")
    prune(home / "checkpoints", Policy(1, every=100))
    assert left(home) == [200, 300, 400, 500]


def test_retention_evaluations_go_on_where_they_ended(home: Path) -> None:
    file = home / "metrics.jsonl"
    found = Evaluations(file, "valid_loss")
    assert found.read() == {150: 2.5, 200: 2.31, 400: 2.75}
    # no number, a cut line, and then the rest of it
    evaluate(home, {450: None})
    with file.open("a") as stream:
        stream.write('{"step": 500, "valid_')
    assert 500 not in found.read()
    with file.open("a") as stream:
        stream.write('loss": 1.5}\nno JSON with "valid_loss"\n')
    assert found.read() == {150: 2.5, 200: 2.31, 400: 2.75, 500: 1.5}
    # a resumed run wrote the file anew
    file.write_text("")
    evaluate(home, {150: 3.0})
    assert found.read() == {150: 3.0}
    assert losses_of(home / "checkpoints", Policy(1)) == {}


def test_retention_run_keeps_what_another_run_names(home: Path) -> None:
    other = home.parent / "b/run.yaml"
    other.parent.mkdir()
    root = home / "checkpoints"
    other.write_text(f"checkpoint:\n  init_from: {root}/step_00000100\n")
    prune(root, Policy(1))
    assert left(home) == [100, 500]
    # the other run begins again, from another checkpoint
    other.write_text(f"checkpoint:\n  init_from: {root}/step_00000500\n")
    os.utime(other, ns=(1, 1))
    (root / "step_00000600").mkdir()
    (root / "step_00000600/manifest.json").write_text("{}")
    prune(root, Policy(1))
    assert left(home) == [500, 600]


def _read(path: Path, begun: Any, over: Any) -> None:
    with folder.reading(path):
        begun.set()
        over.wait(30)


@pytest.fixture
def reader(home: Path) -> Iterator[Any]:
    """Yield an event that ends a process which reads the oldest checkpoint."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    over = context.Event()
    path = home / "checkpoints" / folder.folder_name(100)
    process = context.Process(target=_read, args=(path, begun, over), daemon=True)
    process.start()
    assert begun.wait(30)
    yield lambda: (over.set(), process.join())
    over.set()
    process.join()


def test_retention_checkpoint_of_a_reading_process_stays(home: Path, reader: Any) -> None:
    path = home / "checkpoints" / folder.folder_name(100)
    # also if the reader begins after the policy has decided
    assert folder.hidden(path) is None
    prune(home / "checkpoints", Policy(1))
    assert left(home) == [100, 500]
    reader()
    prune(home / "checkpoints", Policy(1))
    assert left(home) == [500]


def test_retention_reader_waits_for_a_question(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "checkpoints" / folder.folder_name(100)
    asking = os.open(path / "manifest.json", os.O_RDONLY)
    assert folder.locks.seize(asking)
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: os.close(asking))
    with folder.reading(path):
        assert folder.is_read(path)


def test_retention_deletion_is_not_taken_for_a_checkpoint(home: Path) -> None:
    path = home / "checkpoints" / folder.folder_name(100)
    hidden = folder.hidden(path)
    assert hidden is not None
    # killed here
    assert left(home) == list(STEPS[1:])
    folder.sweep(home / "checkpoints")
    assert not hidden.exists()


def test_retention_command_says_why_each_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.cli.checkpoint import change

    (home / "run.yaml").write_text("")
    own = Policy(1, every=300, best="valid_loss")
    monkeypatch.setattr(change, "Policy", type("P", (), {"of": lambda section: own}))
    monkeypatch.setattr(change, "read_run_file", lambda path: type("R", (), {"checkpoint": None}))
    monkeypatch.setattr(change, "is_complete", lambda path: True)

    def said(*words: str) -> list[str]:
        assert main(["checkpoint", "prune", str(home), "--dry-run", *words]) == 0
        return capsys.readouterr().out.splitlines()

    lines = said()
    assert [line.partition(",")[0] for line in lines[:2]] == [
        "step_00000100: would be deleted",
        "step_00000400: would be deleted",
    ]
    assert lines[2:5] == [
        "step_00000200: stays, best valid_loss 2.31",
        "step_00000300: stays, step is a multiple of 300",
        "step_00000500: stays, one of the newest",
    ]
    assert len(said("keep_every=null", "keep_best=null")) == 6
    assert "step_00000400: stays, step is a multiple of 200" in said("keep_every=200")
    assert main(["checkpoint", "prune", str(home), "keep_every=0"]) == 2
    assert main(["checkpoint", "prune", str(home), "keep_best=loss"]) == 2
    body = json.loads("".join(said("--json")))
    assert (body["keep"], body["keep_every"], body["keep_best"]) == (1, 300, "valid_loss")
    assert "step_00000200: best valid_loss 2.31" in body["kept"]
