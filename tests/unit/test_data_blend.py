"""A blend: shares that hold in every block, each part's samples without a gap, the same for any batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.groups import DataConfig
from mtrain.config.rules import apply
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.batch import GlobalBatches
from mtrain.data.blend import BLOCK, Blend, Stretch
from mtrain.data.indexed import IndexedDataset, IndexedWriter
from mtrain.data.samples import Samples
from mtrain.errors import ConfigError
from mtrain.recipes.megatron import export_script, import_texts
from tests.support.configs import errors, first_fix, tiny

L = 8
STEP = 10_000
"""Tokens of part i are those from i * STEP on."""


def corpus(prefix: Path, first: int, tokens: int) -> str:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.arange(first, first + tokens), np.full(tokens // 10, 10))
    return str(prefix)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        corpus(tmp_path / name, i * STEP, n) for i, (name, n) in enumerate({"a": 4000, "b": 2000, "c": 800}.items())
    ]


def blend(prefixes: list[str], shares: list[float], seed: int = 1) -> Blend:
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    return Blend([Samples(d, range(d.num_documents), L, seed, True, 60_000) for d in sets], shares, seed)


def config(prefixes: list[str], **more: object) -> DataConfig:
    words = {"kind": "indexed", "blend": prefixes, "seq_length": L, "split": [0.8, 0.1, 0.1]}
    return DataConfig.model_validate({**words, **more})


@given(weights=st.lists(st.floats(1e-4, 100), min_size=1, max_size=6), blocks=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_part_is_ever_a_sample_away_from_its_share(weights: list[float], blocks: int) -> None:
    shares = np.array(weights) / sum(weights)
    one = Stretch(0, 0, None, shares, np.zeros(len(weights), np.int64))
    given_, then = one.given(blocks * one.block), one.given((blocks + 1) * one.block)
    assert given_.sum() == blocks * one.block
    assert (then - given_ >= 0).all()
    assert (np.abs(given_ - shares * blocks * one.block) <= 1 + 1e-6 * (1 + blocks)).all()


def test_shares_hold_in_every_block_and_samples_of_a_part_come_one_after_another(prefixes: list[str]) -> None:
    mixed = blend(prefixes, [6.0, 3.0, 1.0])
    part, index = mixed.places(range(5 * BLOCK))
    for start in range(0, 5 * BLOCK, BLOCK):
        counts = np.bincount(part[start : start + BLOCK], minlength=3)
        assert np.abs(counts - BLOCK * np.array([0.6, 0.3, 0.1])).max() < 2
    for i in range(3):
        assert sorted(index[part == i]) == list(range((part == i).sum())), "each is given once, and none is left out"
    assert len(set(part[:20])) > 1, "corpora are mixed within a block"


def test_a_sample_is_a_function_of_its_number_alone(prefixes: list[str]) -> None:
    mixed = blend(prefixes, [1.0, 1.0, 1.0])
    numbers = [3, 10**9, BLOCK, 0, 7 * BLOCK + 5]
    together = mixed.batch(numbers)
    assert all((mixed.batch([n])[0] == row).all() for n, row in zip(numbers, together, strict=True))
    part, _ = mixed.places(numbers)
    assert (together // STEP == part[:, None]).all()
    assert not (blend(prefixes, [1.0, 1.0, 1.0], seed=2).batch(range(50)) == mixed.batch(range(50))).all()


def test_micro_batches_are_the_same_samples_whatever_the_ranks(prefixes: list[str]) -> None:
    data = config(prefixes, blend_weights=[1.0, 2.0, 1.0])
    train = open_splits(data, 60_000, 5, prepare(data)).train
    one = [m["tokens"] for m in GlobalBatches(train, 16, 2, 0, 1).microbatches(32)]
    ranks = [[m["tokens"] for m in GlobalBatches(train, 16, 2, r, 2).microbatches(32)] for r in (0, 1)]
    assert all((one[2 * m + r] == ranks[r][m]).all() for m in range(4) for r in (0, 1))


def test_splits_are_cut_from_each_corpus_and_weights_follow_from_tokens(prefixes: list[str]) -> None:
    data = config(prefixes)
    splits = open_splits(data, 60_000, 5, prepare(data), need=("train",))
    assert isinstance(splits.train, Blend)
    assert splits.train.shares == pytest.approx(np.array([4000, 2000, 800]) / 6800)
    assert splits.describe()["tokens"] == 6800
    assert [p.documents for p in splits.train.parts] == [range(320), range(160), range(64)]
    assert splits.dataset is None


def test_another_order_of_corpora_is_other_data(prefixes: list[str]) -> None:
    data, turned = config(prefixes), config(prefixes[::-1])
    saved = open_splits(data, 60_000, 5, prepare(data), need=("train",)).describe()
    same_data(saved, open_splits(data, 60_000, 5, prepare(data), need=("train",)).describe())
    with pytest.raises(ConfigError, match="not the one"):
        same_data(saved, open_splits(turned, 60_000, 5, prepare(turned), need=("train",)).describe())


def test_a_part_that_is_too_small_is_named(tmp_path: Path, prefixes: list[str]) -> None:
    data = config([prefixes[0], corpus(tmp_path / "d", 0, 20)], seq_length=64)
    with pytest.raises(ConfigError, match="20 tokens"):
        open_splits(data, 60_000, 5, prepare(data), need=("train",))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("MT316", {"data.path": "P0"}),
        ("MT317", {"data.blend": ["P0", "P1", "P0"]}),
        ("MT318", {"data.blend_weights": [1.0, 2.0]}),
        ("MT318", {"data.blend_weights": [1.0, 2.0, 1e-9]}),
        ("MT306", {"data.blend": ["P0", "P1x"]}),
        ("MT150", {"data.kind": "mock", "data.split": [0.9, 0.1, 0.0]}),
        ("MT150", {"data.blend": None, "data.path": "P0", "data.blend_weights": [1.0]}),
    ],
)
def test_a_blend_that_cannot_be_is_refused_with_a_fix_that_works(
    code: str, change: dict[str, object], prefixes: list[str]
) -> None:
    def real(value: object) -> object:
        if isinstance(value, list):
            return [real(item) for item in value]
        return prefixes[int(value[1])] + value[2:] if isinstance(value, str) and value[0] == "P" else value

    base = {"data.kind": "indexed", "data.blend": prefixes, "data.seq_length": 16, "model.vocab_size": 60_000}
    base["trainer.eval_iters"] = 0
    raw = apply(tiny(), base)
    assert errors(raw) == []
    raw = apply(raw, {key: real(value) for key, value in change.items()})
    found = [p for p in errors(raw) if p.code == code]
    assert found, errors(raw)
    assert code not in {p.code for p in errors(apply(raw, first_fix(found[0])))}


@pytest.mark.parametrize("weights", [None, [0.7, 0.2, 0.1], [3.0, 1.0, 1.0]])
def test_a_blend_has_its_flag_in_both_directions(weights: list[float] | None, prefixes: list[str]) -> None:
    change = {"data.kind": "indexed", "data.blend": prefixes, "data.blend_weights": weights}
    text = export_script(apply(tiny(trainer__sample_tokens=0, parallel__ranks=1), change))
    back = import_texts([(text, "s.sh")], "s").run.data
    assert (list(back.blend or ()), back.path) == (prefixes, None)
    assert (None if back.blend_weights is None else list(back.blend_weights)) == weights
    assert "#" not in text.split("--data-path")[1].splitlines()[0]
