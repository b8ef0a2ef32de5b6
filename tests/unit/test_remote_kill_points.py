"""A process that is killed before, within or after any request that changes an object store: what
is committed there is whole, and the next start leaves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import Place
from mtrain.ckpt.retention import Policy
from mtrain.config.resolve.resolution import resolve
from tests.faults.promises import Record, measured
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import committed

URL = "memory://bucket/run"
STEPS = (1, 2, 3, 4)
KEPT = 2
LAST = STEPS[-1]
MOMENTS = ("before", "within", "after")
HEADS = {"model__num_attention_heads": 2, "model__num_query_groups": 2}
CHANGES = ("put_file", "pipe_file", "rm_file")


class Killed(BaseException):
    """The end of the process."""


class Requests:
    """Requests that change the store; the process ends at one of them."""

    def __init__(self, at: int = -1, moment: str = "before") -> None:
        self.at = at
        self.moment = moment
        self.count = 0

    def watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return a request that counts, and that does nothing once the process has ended."""

        def request(files: Any, *args: Any, **more: Any) -> Any:
            if 0 <= self.at < self.count:
                raise Killed
            self.count += 1
            if self.count <= self.at or self.at < 0:
                return change(files, *args, **more)
            if self.moment == "within" and change.__name__ == "put_file":
                data = Path(args[0]).read_bytes()
                MemoryFileSystem.pipe_file(files, args[1], data[: len(data) // 2])
            elif self.moment == "after":
                change(files, *args, **more)
            raise Killed

        return request


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Return small checkpoints, one per step, and another one of the last step."""
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "vocab_size": 32}
    model = {f"model__{key}": value for key, value in sizes.items()}
    run = resolve(tiny(**model, **HEADS, parallel__tp=2, parallel__ranks=2), LAPTOP)
    found = [committed(run, tmp_path / "first", step) for step in STEPS]
    return [*found, committed(run, tmp_path / "again", LAST, consumed=7)]


def live(checkpoints: list[Path], done: list[int]) -> None:
    """Upload as a run does that saves all steps and the last one again, and delete older ones."""
    for path in checkpoints:
        place = Place(URL) / path.name
        transfer.upload(path, place, replace=True)
        done.append(int(path.name.removeprefix("step_")))
        transfer.pruned(Place(URL), Policy(KEPT), {})


def killed(checkpoints: list[Path], requests: Requests) -> list[int]:
    """Live until the process ends; return the steps whose uploads had ended."""
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            change = getattr(MemoryFileSystem, name)
            patch.setattr(MemoryFileSystem, name, requests.watched(change))
        with suppress(Killed):
            live(checkpoints, done)
    return done


def whole() -> list[int]:
    """Return the steps that the store has committed, each of which is whole."""
    found = Place(URL).committed()
    for one in found:
        assert transfer.verified(Place(URL) / one.name).damage == (), one.name
    return [one.step for one in found]


@pytest.mark.full
def test_remote_kill_points_lose_at_most_one_step(
    store: Any, checkpoints: list[Path], record_property: Record
) -> None:
    counted = Requests()
    assert killed(checkpoints, counted) == [*STEPS, LAST]
    assert counted.count > 20
    lost = 0
    points = [(at, moment) for at in range(counted.count) for moment in MOMENTS]
    for at, moment in points:
        store.rm("/bucket", recursive=True)
        done = killed(checkpoints, Requests(at, moment))
        assert len(done) <= len(STEPS), (at, moment)
        newest = max(whole(), default=0)
        lost = max(lost, max(done, default=0) - newest)
        assert lost <= 1, (at, moment)
        live(checkpoints, [])
        assert whole() == [*STEPS[-KEPT:]], (at, moment)
        assert all(one.is_committed for one in Place(URL).checkpoints()), (at, moment)
        manifest = (checkpoints[-1] / "manifest.json").read_bytes()
        assert (Place(URL) / checkpoints[-1].name).read("manifest.json") == manifest
    measured(record_property, kill_points=len(points), intervals_lost=lost)
