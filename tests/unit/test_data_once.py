"""An evaluation reads each sample of a split once: in every order, of one corpus and of a blend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.data import Splits, open_splits, prepare
from mtrain.data.batch import GlobalBatches
from mtrain.data.store.indexed import IndexedWriter

SEQ = 8
VOCAB = 60_000
PARTS = (60, 600)
"""Documents of each corpus; no token of them is there twice."""


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("once")
    first = 0
    found = []
    for number, many in enumerate(PARTS):
        lengths = np.full(many, 20)
        with IndexedWriter(home / str(number), np.dtype("<u2")) as writer:
            writer.add(np.arange(first, first + int(lengths.sum())), lengths)
        first += int(lengths.sum())
        found.append(str(home / str(number)))
    return found


def splits_of(tmp_path: Path, asked: int, **more: Any) -> Splits:
    words = {
        "kind": "indexed",
        "seq_length": SEQ,
        "split": [0.5, 0.5, 0.0],
        "cache_dir": str(tmp_path),
    }
    data = DataConfig.model_validate({**words, **more})
    return open_splits(
        data, VOCAB, 7, prepare(data), ("train", "validation"), (100, 5 * asked, asked)
    )


def counted(splits: Splits, asked: int, batch: int) -> list[int]:
    """Return every label whose loss counts in an evaluation of `asked` samples."""
    from mtrain.data.batch import evaluation_samples

    data = GlobalBatches(
        evaluation_samples(splits.validation, asked), batch, batch, 0, 1, limit=asked
    )
    found: list[int] = []
    for step in range(data.steps):
        for one in data.microbatches(step * batch):
            found += one["labels"][one["loss_mask"] > 0].tolist()
    assert len(found) == data.counted * SEQ
    return found


KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "Megatron's order": {"order": "megatron"},
    "blend": {"blend_weights": [0.9, 0.1]},
    "blend by size": {},
    "blend in Megatron's order": {"order": "megatron", "blend_weights": [0.9, 0.1]},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_once_no_token_counts_twice(kind: str, prefixes: list[str], tmp_path: Path) -> None:
    source = {"blend": prefixes} if "blend" in kind else {"path": prefixes[0]}
    whole = sum(PARTS) if "blend" in kind else PARTS[0]
    many = whole * 20 // 2 // SEQ  # samples of half of all documents, about
    for asked in (3 * many, many // 4):
        found = counted(splits_of(tmp_path, asked, **source, **KINDS[kind]), asked, 7)
        assert len(set(found)) == len(found)
        if kind != "blend in Megatron's order":
            least = 0.9 * min(many, asked) * SEQ
        else:
            least = PARTS[0] * 10 * 0.9
        assert len(found) >= least
        assert found == counted(splits_of(tmp_path, asked, **source, **KINDS[kind]), asked, 4)
