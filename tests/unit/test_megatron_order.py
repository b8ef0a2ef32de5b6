"""Megatron-LM's own order: made once, read from its caches, validated; `tests/distributed` compares
with megatron-core.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.samples.blend import Blend
from mtrain.data.samples.megatron_order import BLOCK, Greedy, MegatronSamples, cut, normalized
from mtrain.data.store import cache
from mtrain.data.store.indexed import IndexedWriter
from mtrain.errors import ConfigError, CorruptData

VOCAB = 60_000
SEQ = 16


def corpus(prefix: Path, sequences: int, seed: int, longest: int = 40) -> str:
    """Write random documents, some of them empty, some of several sequences."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, sequences)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(random.integers(0, VOCAB, int(lengths.sum())), lengths)
    return str(prefix)


def config(paths: list[str], **more: Any) -> DataConfig:
    one = {"path": paths[0]} if len(paths) == 1 and "blend" not in more else {"blend": paths}
    words = {
        "kind": "indexed",
        "seq_length": SEQ,
        "order": "megatron",
        "split": [0.8, 0.15, 0.05],
        **one,
    }
    return DataConfig.model_validate({**words, **more})


def _no_space(*args: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_megatron_order_is_made_once_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALL", 100)
    data = config([corpus(tmp_path / "a", 3000, 1)], cache_dir=str(tmp_path / "cache"))
    memory = config([data.path], cache_dir="/dev/null/nowhere")  # type: ignore[list-item]
    asked = (6000, 100, 20)

    def train(of: DataConfig) -> MegatronSamples:
        found = open_splits(of, VOCAB, 7, prepare(of), (), asked).train
        assert isinstance(found, MegatronSamples)
        return found

    first = train(data)
    folders = sorted((tmp_path / "cache").glob("order-*[0-9a-f]"))
    times = [(f / "shuffled.npy").stat().st_mtime_ns for f in folders]
    assert len(folders) == 3, "one for each split"
    again = train(data)
    assert [(f / "shuffled.npy").stat().st_mtime_ns for f in folders] == times
    assert isinstance(again._shuffled, np.memmap)
    numbers = np.random.default_rng(0).integers(0, len(first), 300)
    assert (again.batch(numbers) == train(memory).batch(numbers)).all()
    full = config([data.path], cache_dir=str(tmp_path / "full"))  # type: ignore[list-item]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _no_space)
        assert (train(full).batch(numbers) == first.batch(numbers)).all()
    assert not list((tmp_path / "full").glob("*order-*[0-9a-f]")), (
        "a disk that is full holds none of it"
    )
    for folder in folders:  # damaged ones are made again
        (folder / "sequences.npy").unlink()  # it is mapped: what is written over it would be seen
        (folder / "sequences.npy").write_bytes(b"no array")
    assert (train(data).batch(numbers) == first.batch(numbers)).all()


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_megatron_order_bad_or_pickled_cache_is_refused(tmp_path: Path, name: str) -> None:
    prefix = corpus(tmp_path / "a", 300, 1)
    folder = tmp_path / "cache"
    folder.mkdir()
    data = config([prefix], megatron_cache=str(folder))
    ours = open_splits(config([prefix]), VOCAB, 7, prepare(data), (), (100, 9, 3)).train
    assert isinstance(ours, MegatronSamples)
    said = {
        "class": "GPTDataset",
        "dataset_path": prefix,
        "num_samples": 100,
        "index_split": "train",
        "random_seed": 7,
        "sequence_length": SEQ,
        "split_matrix": [[0.0, 0.8], [0.8, 0.9500000000000001], [0.9500000000000001, 1.0]],
    }
    said["split_matrix"] = [list(shares) for _, shares in cut(300, data.split)]
    (folder / "00-GPTDataset-train-description.txt").write_text(json.dumps(said))
    places = np.zeros((len(ours) + 1, 2), np.int32)
    for i in range(len(places)):
        at = np.searchsorted(
            np.cumsum(lengths := ours.dataset.lengths[ours._sequences]), i * SEQ, side="right"
        )
        places[i] = at, i * SEQ - int(lengths[:at].sum())
    good = {
        "document_index": ours._sequences,
        "sample_index": places,
        "shuffle_index": ours._shuffled,
    }

    def write(other: dict[str, np.ndarray]) -> None:
        for key, array in (good | other).items():
            np.save(folder / f"00-GPTDataset-train-{key}.npy", array, allow_pickle=True)

    def train() -> MegatronSamples:
        return open_splits(data, VOCAB, 7, prepare(data), (), (100, 9, 3)).train  # type: ignore[return-value]

    write({})
    assert train().from_cache
    assert (train().batch(range(100)) == ours.batch(range(100))).all()
    array = good[name]
    bad_arrays = [
        array[:-1],
        array.astype(np.float32),
        np.array([Bomb(tmp_path)] * len(array), object),
    ]
    if name != "shuffle_index":
        bad_arrays.append(array + 299)
    for bad in bad_arrays:
        write({name: bad})
        with pytest.raises(CorruptData, match=r"00-GPTDataset-train"):
            train()
    path = folder / f"00-GPTDataset-train-{name}.npy"
    header = (
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i4', 'fortran_order': False, 'shape':"
        b" (99999999999999,), }"
    )
    for content in (b"", b"\x80\x04N.", path.read_bytes()[:70], header.ljust(127) + b"\n"):
        path.write_bytes(content)
        with pytest.raises(CorruptData, match=r"00-GPTDataset-train"):
            train()
    path.unlink()
    with pytest.raises(CorruptData, match="cannot be read"):
        train()
    assert not (tmp_path / "exploded").exists()


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.touch, (self.folder / "exploded",)


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=5), st.integers(0, 16))
@settings(max_examples=2, deadline=None)
def test_megatron_order_parallel_pieces_equal_sequence(weights: list[float], block: int) -> None:
    shares = normalized(weights)
    one = Greedy(shares)
    part, index = one.places(np.arange(block * BLOCK, block * BLOCK + 5))
    wanted = []
    count = np.zeros(len(shares))
    for i in range(block * BLOCK + 5):
        d = int((shares * max(i, 1) - count).argmax())
        wanted.append((d, int(count[d])))
        count[d] += 1
    assert list(zip(part.tolist(), index.tolist(), strict=True)) == wanted[block * BLOCK :]
    assert one.given(block * BLOCK + 5).tolist() == count.tolist()


def test_megatron_order_oversized_blend_is_refused(tmp_path: Path) -> None:
    paths = [corpus(tmp_path / name, n, n) for name, n in {"a": 400, "b": 30}.items()]
    data = config(paths, split=[1.0, 0.0, 0.0])
    train = open_splits(data, VOCAB, 7, prepare(data), (), (10, 0, 0)).train
    assert isinstance(train, Blend)
    assert len(train) == 10
    with pytest.raises(ConfigError, match=r"the run needs"):
        open_splits(data, VOCAB, 7, prepare(data), (), (10**6, 0, 0))


def test_megatron_order_changed_order_on_resume_is_refused(tmp_path: Path) -> None:
    data = config([corpus(tmp_path / "a", 300, 1)])

    def of(samples: int) -> dict[str, Any]:
        return open_splits(data, VOCAB, 7, prepare(data), (), (samples, 9, 3)).describe()

    same_data(of(100), of(150))
    for before, after in ((100, 320), (320, 1000), (320, 560)):
        with pytest.raises(ConfigError, match="Megatron's order follows from the steps of a run"):
            same_data(of(before), of(after))
