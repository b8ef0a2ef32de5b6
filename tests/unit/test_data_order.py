"""Every order of samples is a function of their numbers: the same for any ranks, after any resume,
none twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare
from mtrain.data.batch import GlobalBatches, next_token_collator
from mtrain.data.samples.token_stream import FillInTheMiddle
from mtrain.data.store.indexed import IndexedWriter
from tests.support.covering import some

VOCAB = 60_000
SEQ = 16
KINDS: dict[str, dict[str, Any]] = {
    "one": {"path": "a"},
    "blend": {"blend": ["a", "b"]},
    "curriculum": {"blend": ["a", "b"], "blend_curriculum": [[0, [1.0, 0.0]], [50, [1.0, 3.0]]]},
    "sizes": {"blend": ["a", "b"], "blend_sizes": [60, 30]},
    "megatron": {"path": "a", "order": "megatron"},
    "megatron blend": {"blend": ["a", "b"], "blend_weights": [2.0, 1.0], "order": "megatron"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two corpora whose tokens are their positions, from 0 and from 30,000 on."""
    for name, first, tokens in (("a", 0, 20_000), ("b", 30_000, 9_000)):
        with IndexedWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add(np.arange(first, first + tokens), np.full(tokens // 50, 50))
    return tmp_path


def source(folder: Path, kind: str) -> Any:
    paths = {
        "path": lambda name: str(folder / name),
        "blend": lambda names: [str(folder / n) for n in names],
    }
    words = {key: paths.get(key, lambda value: value)(value) for key, value in KINDS[kind].items()}
    data = DataConfig.model_validate(
        {"kind": "indexed", "seq_length": SEQ, "split": [1.0, 0.0, 0.0], **words}
    )
    return open_splits(data, VOCAB, 3, prepare(data), ("train",), (4000, 0, 0)).train


@pytest.mark.parametrize("kind", some(KINDS, ["one", "curriculum", "megatron blend"]))
def test_order_step_is_independent_of_ranks_and_resume(folder: Path, kind: str) -> None:
    def steps(dp: int, steps: range) -> np.ndarray:
        ranks = [GlobalBatches(source(folder, kind), 16, 2, rank, dp) for rank in range(dp)]
        out = []
        for step in steps:
            each = [rank.microbatches(16 * step) for rank in ranks]
            out += [each[r][m]["tokens"].numpy() for m in range(16 // 2 // dp) for r in range(dp)]
        return np.concatenate(out)

    whole = steps(1, range(12))
    assert all((steps(dp, range(12)) == whole).all() for dp in (2, 4))
    assert (np.concatenate([steps(2, range(5)), steps(4, range(5, 12))]) == whole).all()


@pytest.mark.parametrize("kind", ["one", "megatron"])
def test_order_epoch_has_each_sample_once(folder: Path, kind: str) -> None:
    train = source(folder, kind)
    epoch = (20_000 - 1) // SEQ if kind == "megatron" else len(train)
    firsts = train.batch(range(epoch))[:, 0]
    if kind == "megatron":  # epochs of Megatron's order are shuffled together, but the last
        firsts = train.batch(range(len(train)))[:, 0]
        assert np.bincount(firsts).max() <= train.shape.epochs
        assert len(set(train._shuffled.tolist())) == len(train)
    else:
        assert len(set(firsts.tolist())) == epoch


END = 0


def middle(
    rate: float, spm: float, windows: np.ndarray, seed: int = 1, part: str = "train"
) -> np.ndarray:
    return FillInTheMiddle(rate, spm, (101, 102, 103), (END,), seed, part)(
        windows, np.arange(len(windows))
    )


def test_order_middle_of_a_share_reads_past_document_end() -> None:
    random = np.random.default_rng(0)
    windows = random.integers(1, 100, (400, 65))
    windows[:, 20] = windows[:, 41] = END
    kinds = {"none": 0, "PSM": 0, "SPM": 0}
    out = middle(0.6, 0.25, windows)
    assert (out == middle(0.6, 0.25, windows)).all()
    assert (out != middle(0.6, 0.25, windows, seed=2)).any()
    assert (out != middle(0.6, 0.25, windows, part="validation")).any()
    assert out.shape == windows.shape
    lengths = []
    for row, moved in zip(windows, out, strict=True):
        assert (moved[[20, 41]] == END).all(), "documents end where they did"
        for piece in (slice(0, 20), slice(21, 41), slice(42, 65)):
            before = row[piece].tolist()
            after = moved[piece].tolist()
            if after == before:
                kinds["none"] += 1
                continue
            suffix_at = after.index(102)
            middle_at = after.index(103)
            assert after[0] == 101
            if suffix_at == 1:
                kinds["SPM"] += 1
                suffix = after[2:middle_at]
                rest = after[middle_at + 1 :]
                assert rest + suffix == before[:-3]
            else:
                kinds["PSM"] += 1
                prefix = after[1:suffix_at]
                suffix = after[suffix_at + 1 : middle_at]
                mid = after[middle_at + 1 :]
                assert prefix + mid + suffix == before[:-3]
                lengths.append(len(mid) / (len(before) - 3))
    assert kinds["none"] / 1200 == pytest.approx(0.4, abs=0.05)
    # PSM with an empty prefix, two boundaries in 18 or more, looks the same
    assert kinds["SPM"] / (1200 - kinds["none"]) == pytest.approx(0.25 + 0.75 * 2 / 20, abs=0.05)
    assert np.mean(lengths) == pytest.approx(1 / 3, abs=0.05), "two uniform boundaries"
    assert (middle(0.0, 0.5, windows) == windows).all()
    short = np.full((3, 3), 7)
    assert (middle(1.0, 0.5, short) == short).all()


def test_order_labels_follow_tokens_as_read(folder: Path) -> None:
    train = source(folder, "one")
    marks = FillInTheMiddle(1.0, 0.5, (50_001, 50_002, 50_003), (END,), 1, "train")
    (batch,) = GlobalBatches(train, 4, 4, 0, 1, next_token_collator(moved=marks)).microbatches(0)
    assert (batch["labels"][:, :-1] == batch["tokens"][:, 1:]).all()
    assert (batch["tokens"][:, 0] == 50_001).all()
    assert sorted(batch["labels"][0].tolist())[-2:] == [50_002, 50_003]
