"""Free space before a save: counted over all ranks, and refused before the first byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.errors import TrainingError
from tests.support.many_ranks import meetings, on_ranks

RANKS = 4


def shard(rank: int, *, primary: bool = True) -> Any:
    """Return a rank's quarter of a tensor of 4 MiB."""
    from mtrain.mcore.state.sharding import TensorShard

    part = torch.full((256, 1024), float(rank))
    return TensorShard("model/w", (1024, 1024), (256 * rank, 0), (256, 1024), part, None, primary)


def save(root: Path, step: int, places: list[Any], frozen: list[Any] | None = None) -> list[Any]:
    """Save a checkpoint of four ranks; return its path, or the error, of each."""
    from mtrain.ckpt import store

    def one(rank: int) -> Path:
        own = [shard(rank), shard(rank, primary=False)]
        still = None if frozen is None else frozen[rank]
        extra = {"rng/torch": torch.arange(600)}
        return store.save(root, step, own, extra, {}, "a: 1\n", places[rank], still)

    return on_ranks(RANKS, one)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Return the disk that a save sees: set its `free` bytes; `asked` is what it had to hold."""
    from mtrain.ckpt import space

    seen = SimpleNamespace(total=1 << 40, free=1 << 40, asked=[])
    real = space.require

    def noted(root: Path, nbytes: int, ranks: int) -> None:
        seen.asked.append(nbytes)
        real(root, nbytes, ranks)

    monkeypatch.setattr(space, "require", noted)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen)
    return seen


def held(path: Path) -> int:
    """Return the bytes that a folder occupies on its disk."""
    return sum(512 * file.stat().st_blocks for file in path.iterdir())


def test_space_one_byte_short_refuses_on_all_ranks(tmp_path: Path, disk: SimpleNamespace) -> None:
    places = meetings(RANKS)
    (path,) = set(save(tmp_path, 1, places))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    # what two killed saves left is gone before the space is counted
    for step in (2, 3):
        (tmp_path / f".saving-step_{step:08d}").mkdir()
    disk.free = disk.asked[0] - 1
    errors = save(tmp_path, 2, places)
    assert [type(error) for error in errors] == [TrainingError] * RANKS
    assert len({str(error) for error in errors}) == 1
    assert all(error.shared for error in errors)
    text = str(errors[0])
    assert "4 ranks would write 4.2 MiB" in text, text
    assert "(4.2 MiB free)" in text, text
    assert "checkpoint.keep" in text, text
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    disk.free += 1
    assert len(set(save(tmp_path, 2, places))) == 1


def test_space_counted_bytes_hold_the_files(tmp_path: Path, disk: SimpleNamespace) -> None:
    (path,) = set(save(tmp_path, 1, meetings(RANKS)))
    assert held(path) <= disk.asked[0] <= held(path) + RANKS * (64 << 10)


def test_space_linked_frozen_tensors_count_once(tmp_path: Path, disk: SimpleNamespace) -> None:
    from mtrain.ckpt.store import Frozen

    places = meetings(RANKS)
    frozen = [Frozen([shard(rank)]) for rank in range(RANKS)]
    for step in (1, 2):
        (path,) = set(save(tmp_path, step, places, frozen))
    assert path.stat(), path
    first, second = disk.asked
    assert first - second == pytest.approx(4 << 20, rel=0.01)
    # an earlier file that is gone is written again
    shutil.rmtree(path)
    save(tmp_path, 3, places, frozen)
    assert disk.asked[2] == first


def test_space_unknown_size_of_disk_has_room(tmp_path: Path, disk: SimpleNamespace) -> None:
    disk.total = 0
    disk.free = 0
    assert len(set(save(tmp_path, 1, meetings(RANKS)))) == 1
