"""Mutations of `.bin/.idx` when they are opened for training: refused, or another corpus for every
run that goes on.

What is seen without a manifest: everything of an index but a document boundary that is moved, and
every id outside of the vocabulary. A token that is changed into another one of the vocabulary is
seen where a run goes on, of a large corpus in the blocks that its fingerprint reads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.store.indexed import IndexedWriter
from mtrain.errors import ConfigError, CorruptData

pytestmark = pytest.mark.full

VOCAB = 500


def mutated(raw: bytes, random: np.random.Generator) -> bytes:
    """Damage a file in one way: bits, bytes, runs of zeros, cuts, insertions, or exchanged
    blocks.
    """
    data = bytearray(raw)
    at = int(random.integers(len(raw)))
    size = int(random.integers(1, 64))
    match int(random.integers(6)):
        case 0:
            data[at] ^= 1 << int(random.integers(8))
        case 1:
            data[at] = int(random.integers(256))
        case 2:
            data[at : at + size] = bytes(len(data[at : at + size]))
        case 3:
            del data[at : at + size]
        case 4:
            data[at:at] = random.bytes(size)
        case 5:
            other = int(random.integers(len(raw)))
            data[at : at + size], data[other : other + size] = (
                data[other : other + size],
                data[at : at + size],
            )
    return bytes(data)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("order", ["keyed", pytest.param("megatron", marks=pytest.mark.full)])
def test_data_mutations_are_all_reported(tmp_path: Path, count: int, order: str) -> None:
    random = np.random.default_rng(count)
    prefix = tmp_path / "a"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        lengths = random.integers(0, 90, 200)
        writer.add(random.integers(0, VOCAB, int(lengths.sum())), lengths)
    files = {name: (tmp_path / name).read_bytes() for name in ("a.bin", "a.idx")}
    data = DataConfig.model_validate(
        {"kind": "indexed", "path": str(prefix), "seq_length": 64, "order": order}
    )

    def opened() -> dict[str, object]:
        splits = open_splits(data, VOCAB, 1, prepare(data), requested=(300, 20, 5))
        splits.check_ids()
        splits.train.batch(range(100))
        return splits.describe()

    saved = opened()
    refused = 0
    other = 0
    same = 0
    for trial in range(count):
        name = ("a.idx", "a.bin")[trial % 2]
        raw = mutated(files[name], random)
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(raw)
        problem = None
        try:
            same_data(saved, opened())
        except (CorruptData, ConfigError) as error:
            problem = error
        if problem is None:
            assert raw == files[name], f"trial {trial}: {name} has changed without a problem"
            same += 1
        elif isinstance(problem, ConfigError):
            assert {p.code for p in problem.problems} <= {"MT609", "MT605"}
            other += 1
        else:
            assert str(tmp_path) in str(problem)
            refused += 1
        (tmp_path / name).write_bytes(files[name])
    assert refused > count / 2
    assert other > count / 50
    assert same < count / 10
