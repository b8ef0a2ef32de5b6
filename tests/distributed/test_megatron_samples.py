"""Megatron-LM's own order: token for token the samples of megatron-core's GPTDataset and
BlendedDataset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare
from mtrain.data.samples.megatron_order import MegatronSamples
from tests.support.forked import run_alone
from tests.unit.test_megatron_order import SEQ, VOCAB, config, corpus


class Tokenizer:
    """Tokenizer with the members that megatron-core's datasets need."""

    vocab_size = VOCAB
    eod = 0
    pad = -1
    unique_identifiers = {"class": "none"}


def theirs(
    paths: list[str],
    asked: tuple[int, int, int],
    weights: list[float] | None = None,
    seed: int = 7,
    split: str = "80,15,5",
    cache: Path | None = None,
    per_split: list[Any] | None = None,
) -> list[np.ndarray | None]:
    """Return the text of the first samples of each split of megatron-core: int64 [n, SEQ + 1]."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    if per_split is None:
        source = {"blend": (paths, weights), "split": split}
    else:
        source = {"blend_per_split": per_split}
    made = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=SEQ,
        tokenizer=Tokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache) if cache else None,
        **source,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, list(asked), lambda: True, made).build()
    out: list[np.ndarray | None] = []
    for part, count in zip(built, asked, strict=True):
        if part is None or not count:
            out.append(None)
            continue
        samples = [part[i] for i in range(min(count, len(part)))]
        rows = [np.append(s["tokens"].numpy(), s["labels"].numpy()[-1:]) for s in samples]
        out.append(np.stack(rows))
    return out


def compare(
    data: DataConfig, asked: tuple[int, int, int], expected: list[np.ndarray | None], seed: int = 7
) -> int:
    """Compare the samples of each split, and return their number."""
    splits = open_splits(data, VOCAB, seed, prepare(data), (), asked)
    compared = 0
    for name, wanted in zip(("train", "validation", "test"), expected, strict=True):
        if wanted is None:
            continue
        found = getattr(splits, name).batch(np.arange(len(wanted)))
        assert (found == wanted).all(), (
            f"{name}: sample {int((found != wanted).any(axis=1).argmax())} is another"
        )
        compared += len(wanted)
    return compared


def ours(paths: list[str], asked: tuple[int, int, int], **more: Any) -> MegatronSamples:
    data = config(paths, **more)
    found = open_splits(data, VOCAB, 7, prepare(data), (), asked).train
    assert isinstance(found, MegatronSamples)
    return found


FEW = 1
MANY = 6


@pytest.mark.parametrize("times", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_megatron_samples_equal_megatron_core(tmp_path: Path, times: int) -> None:
    big = corpus(tmp_path / "big", 1500 * times, 1)
    small = corpus(tmp_path / "small", 300, 2)
    more = [
        corpus(tmp_path / name, n, i)
        for i, (name, n) in enumerate({"x": 800, "y": 2000, "z": 150}.items())
    ]
    cache = {"cache_dir": str(tmp_path)}

    def job() -> int:
        compared = 0
        # one epoch, a few, many; the last epoch for itself and with the others
        cases = [
            (big, (1300 * times, 100, 20)),
            (small, (100, 20, 2)),
            (small, (560, 60, 9)),
            (small, (1111, 9, 5)),
        ]
        for path, asked in cases:
            compared += compare(config([path], **cache), asked, theirs([path], asked))
        one = config([small], blend=[small], **cache)
        compared += compare(one, (560, 20, 3), theirs([small], (560, 20, 3)))
        one = config([small], blend=[small], blend_weights=[2.0], **cache)
        compared += compare(one, (560, 20, 3), theirs([small], (560, 20, 3), [2.0]))
        blends = (
            ([0.3, 0.6, 0.1], (420 * times, 60, 10)),
            ([5.0, 1.0, 1.0], (300, 7, 3)),
            (None, (900, 40, 5)),
        )
        for weights, asked in blends:
            data = config(more, blend_weights=weights, **cache)
            compared += compare(data, asked, theirs(more, asked, weights))
        per_split = [(more[:2], [0.2, 0.8]), ([small], None), None]
        data = config(more[:2], blend_weights=[0.2, 0.8], validation_blend=[small], **cache)
        compared += compare(data, (700, 50, 0), theirs([], (700, 50, 0), per_split=per_split))
        theirs([small], (560, 60, 9), cache=tmp_path / "theirs")
        return compared

    assert ours([small], (1111, 1, 1)).shape.final_apart
    assert not ours([small], (560, 1, 1)).shape.final_apart
    assert run_alone(job) > (10_000 if times == MANY else 5000)
    read = ours([small], (560, 60, 9), megatron_cache=str(tmp_path / "theirs"))
    made = ours([small], (560, 60, 9))
    assert read.from_cache
    assert not made.from_cache
    assert (read.batch(range(500)) == made.batch(range(500))).all()
    other = ours([small], (559, 60, 9), megatron_cache=str(tmp_path / "theirs"))
    assert not other.from_cache, "it is of another number of samples"
