"""Checkpoints that ranks read from an object store, without a copy on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import Place
from mtrain.errors import CorruptData
from tests.support.forked import RankFailed, run_ranks
from tests.support.runs import tiny_run, train_steps

URL = "memory://addressed/run/step_00000001"
LARGE = {"num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 1024, "vocab_size": 1024}
"""Weights of several blocks."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Return a checkpoint of two ranks, and a folder that stands for its copy in a store."""
    root = tmp_path_factory.mktemp("saved")
    run = tiny_run(ranks=2, tp=2, model=LARGE)
    run_ranks(2, lambda: train_steps(run, 1, save_to=root))
    local = root / "step_00000001"
    transfer.upload(local, Place(URL))
    standing = root / "standing/step_00000001"
    standing.mkdir(parents=True)
    transfer.referred(Place(URL), standing)
    yield local, standing
    fsspec.filesystem("memory").rm("/addressed", recursive=True)


def loaded(path: Path, ranks: int) -> tuple[int, str]:
    """Load a checkpoint as a rank; return the bytes that it took from the store, and the hash of
    what it has then.
    """
    from mtrain.ckpt import hashes
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.contents import Contents
    from mtrain.mcore.state import sharding
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.world.init import joined

    taken = []
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, *words: Any, **more: Any) -> bytes:
        data: bytes = real(self, *words, **more)
        taken.append(len(data))
        return data

    MemoryFileSystem.cat_file = cat_file
    run = tiny_run(ranks=ranks, tp=ranks, model=LARGE)
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        opened = ckpt_state.opened(path, run, world)
        assert ckpt_state.load(opened, world, parts.state, seed=1) == (ranks == 2)
        shards = sharding.model_shards(parts.state.chunks)
        shards += sharding.optimizer_shards(parts.state.chunks, parts.state.optimizer)
        found = {
            shard.key: hashes.hash_bytes(shard.tensor.detach().contiguous().numpy())
            for shard in shards
            if Contents.of("a", [shard]).nbytes
        }
    return sum(taken), json.dumps(found, sort_keys=True)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_addresses_ranks_read_only_their_parts(saved: tuple[Path, Path], ranks: int) -> None:
    local, standing = saved
    assert not list(standing.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in local.iterdir())
    before = run_ranks(ranks, loaded, local, ranks)
    after = run_ranks(ranks, loaded, standing, ranks)
    assert [state for _, state in before] == [state for _, state in after]
    assert [taken for taken, _ in before] == [0] * ranks
    for taken, _ in after:
        assert 0.95 * size / ranks < taken < 1.1 * size / ranks, f"{taken} of {size} bytes"


@pytest.mark.full
def test_addresses_damage_is_found_by_its_reader(saved: tuple[Path, Path]) -> None:
    _, standing = saved
    files = fsspec.filesystem("memory")
    name = f"{URL}/rank_00001.safetensors"
    data = files.cat_file(name)
    try:
        files.pipe_file(name, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises((CorruptData, RankFailed), match=f"{name} is not what was written"):
            run_ranks(2, loaded, standing, 2)
    finally:
        files.pipe_file(name, data)


def test_addresses_folder_of_another_place_is_refused(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    from mtrain.ckpt import folder

    # Somebody else's: no command here has made it.
    copied = Path(shutil.copytree(saved[1], tmp_path / "step_00000001"))
    with pytest.raises(CorruptData, match=r"address\.json was made for another folder"):
        folder.read_manifest(copied, verify=False)


def test_addresses_range_is_requested_again(
    saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import folder, sources

    monkeypatch.setattr(sources, "RETRY_S", 0.001)
    real = MemoryFileSystem.cat_file
    calls = []

    def flaky(self: Any, *words: Any, **more: Any) -> bytes:
        calls.append(words)
        if len(calls) % sources.TRIES:
            raise TimeoutError("https://signed.example/?token=secret")
        data: bytes = real(self, *words, **more)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    folder.read_manifest(saved[1], verify=True)
    assert len(calls) >= 3 * sources.TRIES
