"""Exports of a run's checkpoints: by a process next to it, which never disturbs it."""

from __future__ import annotations

import os
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mtrain.ckpt import folder
from mtrain.ckpt.retention import Policy, prune
from mtrain.cli.main import main
from tests.distributed.test_endings import train
from tests.support.commands import wait_for
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run


@pytest.fixture(autouse=True, scope="module")
def engine() -> None:
    import_engine()


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_exports_folder_equals_that_of_the_command(tmp_path: Path) -> None:
    run = tiny_run(ranks=2, tp=2, trainer={"train_iters": 3}, optim={"warmup_iters": 1})
    saving = {"save_interval": 1, "keep": None, "hf_every": 2}
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=saving)})

    def job() -> str:
        end = train(run, tmp_path)
        assert end.error == "", end.said
        return end.said if dist.get_rank() == 0 else ""

    said = run_ranks(2, job)[0]
    made = tmp_path / "hf/step_00000002"
    assert f"step 2: exported {made}" in said, said
    assert [path.name for path in (tmp_path / "hf").iterdir()] == [made.name]
    checkpoint = tmp_path / "checkpoints" / made.name
    assert (
        main(["convert", "export", str(checkpoint), str(tmp_path / "later"), "logits=false"]) == 0
    )
    assert contents(made) == contents(tmp_path / "later")
    assert "model.safetensors" in contents(made)


class Place:
    """A run folder with checkpoints of steps 1 to 4, and the hook of a run of four steps."""

    def __init__(self, home: Path, every: int = 2) -> None:
        self.home = home
        for step in range(1, 5):
            self.path(step).mkdir(parents=True, exist_ok=True)
            (self.path(step) / "manifest.json").write_text("{}")
        from mtrain.train.hooks.exports import Exports

        self.said: list[str] = []
        self.hook = Exports(home, SimpleNamespace(note=self.said.append))  # type: ignore[arg-type]
        checkpoint = SimpleNamespace(hf_every=every, barrier_timeout_s=30.0)
        trainer = SimpleNamespace(steps=4)
        self.stop = SimpleNamespace(requested=False)
        store = dist.HashStore()
        self.context: Any = SimpleNamespace(
            run=SimpleNamespace(checkpoint=checkpoint, trainer=trainer),
            world=SimpleNamespace(is_rank0=True, rank=0, size=1, store=store),
            state=SimpleNamespace(step=0),
            stop=self.stop,
        )

    def path(self, step: int) -> Path:
        return self.home / "checkpoints" / folder.folder_name(step)

    def save(self, step: int) -> None:
        self.context.state.step = step
        self.hook.saved(self.context, self.path(step))

    def end(self) -> None:
        """End the run as one that has made its last step."""
        self.context.state.step = 4
        self.hook.finish(self.context)
        self.hook.close()
        self.hook.after_run(self.context)

    @property
    def pid(self) -> int:
        process = self.hook.queue[0].process
        assert process is not None
        return process.pid


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.hook.close()


def act(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let exports run some Python, which knows the new folder as `out` and its draft as `draft`."""
    given = (
        "import os, sys, time, pathlib; out = pathlib.Path(sys.argv[-2]);"
        f" draft = out.with_name('.exporting-' + out.name); {code}"
    )
    starter = (
        "import sys, mtrain.processes as p;"
        f" p.in_background(int(sys.argv[1]), [sys.executable, '-c', {given!r}, *sys.argv[2:]])"
    )
    monkeypatch.setattr("mtrain.train.hooks.exports.STARTER", starter)


WRITES = "out.mkdir(parents=True)"
HANGS = "draft.mkdir(parents=True); time.sleep(60)"


def test_exports_every_nth_is_written_before_the_run_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(monkeypatch, f"time.sleep(0.2); {WRITES}")
    for step in range(1, 5):
        place.save(step)
    place.end()
    assert sorted(path.name for path in (place.home / "hf").iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]
    assert any(
        line.startswith("waiting for 2 exports (step 2, 4), at most 30 s") for line in place.said
    )
    assert place.said[-1] == f"step 4: exported {place.home}/hf/step_00000004"


def test_exports_failure_is_one_warning(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    act(monkeypatch, "sys.exit('no room on the disk')")
    place.save(1)
    place.save(2)
    place.end()
    assert capsys.readouterr().err.count("warning: the export of step 2") == 1
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    place.save(3)
    place.save(4)
    assert "No such file" in capsys.readouterr().err
    assert not place.hook.queue


def test_exports_checkpoint_is_not_pruned_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(monkeypatch, HANGS)
    place.save(1)
    place.save(2)
    wait_for(lambda: (place.home / "hf/.exporting-step_00000002").exists(), 20)
    prune(place.home / "checkpoints", Policy(1))
    assert [folder.step_of(p) for p in folder.committed(place.home / "checkpoints")] == [2, 4]
    pid = place.pid
    place.hook.close()
    # a run that is stopped leaves neither process nor draft
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not list((place.home / "hf").iterdir())
    prune(place.home / "checkpoints", Policy(1))
    assert [folder.step_of(p) for p in folder.committed(place.home / "checkpoints")] == [4]


def test_exports_of_a_stopped_run_are_made_up_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(monkeypatch, WRITES)
    (place.home / "hf/.exporting-step_00000002").mkdir(parents=True)
    resumed = Place(place.home)
    resumed.context.state.step = 2
    resumed.hook.load_state_dict({"committed": 2, "waiting": [1, 9]})
    resumed.hook.start(resumed.context)
    assert resumed.hook.state_dict() == {"committed": 3, "waiting": [1, 2]}
    resumed.end()
    # what no longer exists is left out
    assert sorted(path.name for path in (place.home / "hf").iterdir()) == [
        "step_00000001",
        "step_00000002",
    ]
    # the same step of another course of the run has a name of its own
    resumed.hook.number = 1
    resumed.save(2)
    resumed.end()
    assert (place.home / "hf/step_00000002-2").exists()


def test_exports_request_to_stop_ends_the_wait(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    act(monkeypatch, HANGS)
    place.save(1)
    place.save(2)
    place.stop.requested = True
    begun = time.monotonic()
    place.end()
    assert time.monotonic() - begun < 10
    assert "the export of step 2 is left out" in capsys.readouterr().err
    # and so does the end of patience
    place.stop.requested = False
    place.context.run.checkpoint.barrier_timeout_s = 0.1
    place.save(3)
    place.save(4)
    place.end()
    assert "the export of step 4 is left out" in capsys.readouterr().err


def test_exports_process_inherits_nothing_of_the_rank(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    descriptor = os.open(place.home, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    facts = (
        "'env': sorted(os.environ), 'nice': os.nice(0), 'files': os.listdir('/proc/self/fd'),"
        " 'leads': os.getsid(0) == os.getpid()"
    )
    act(monkeypatch, f"{WRITES}; (out / 'seen').write_text(repr({{{facts}}}))")
    place.save(1)
    place.save(2)
    place.end()
    os.close(descriptor)
    found: dict[str, Any] = literal_eval((place.home / "hf/step_00000002/seen").read_text())
    assert found["nice"] == 19
    assert found["leads"]
    assert not {"RANK", "MASTER_ADDR"} & set(found["env"])
    # the three of every process, and the one that lists them
    assert len(found["files"]) == 4
