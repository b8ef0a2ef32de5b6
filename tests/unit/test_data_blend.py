"""A blend: shares that hold in every block, each part's samples without a gap, the same for any
batch size.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import apply
from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare, same_data
from mtrain.data.batch import GlobalBatches
from mtrain.data.samples.blend import BLOCK, SMALL, Blend, Stretch, by_sizes
from mtrain.data.samples.token_stream import Samples
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter
from mtrain.errors import ConfigError
from mtrain.recipes.megatron.exporter import export_script
from mtrain.recipes.megatron.importer import import_texts
from tests.support.configs import LAPTOP, errors, first_fix, tiny

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
        corpus(tmp_path / name, i * STEP, n)
        for i, (name, n) in enumerate({"a": 4000, "b": 2000, "c": 800}.items())
    ]


def blend(prefixes: list[str], shares: list[float], seed: int = 1) -> Blend:
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    return Blend(
        [Samples(d, range(d.num_documents), L, seed, True, 60_000) for d in sets], shares, seed
    )


def config(prefixes: list[str], **more: object) -> DataConfig:
    words = {"kind": "indexed", "blend": prefixes, "seq_length": L, "split": [0.8, 0.1, 0.1]}
    return DataConfig.model_validate({**words, **more})


@given(weights=st.lists(st.floats(1e-4, 100), min_size=1, max_size=6), blocks=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_blend_part_stays_within_a_sample_of_its_share(weights: list[float], blocks: int) -> None:
    shares = np.array(weights) / sum(weights)
    one = Stretch(0, 0, None, shares, np.zeros(len(weights), np.int64))
    given_ = one.given(blocks * one.block)
    then = one.given((blocks + 1) * one.block)
    assert given_.sum() == blocks * one.block
    assert (then - given_ >= 0).all()
    # Halving distributes tiny shares, and may be off by a sample for each of three halvings.
    most = 3 if shares.min() < SMALL else 1
    assert (np.abs(given_ - shares * blocks * one.block) <= most + 1e-6 * (1 + blocks)).all()


def test_blend_shares_hold_in_every_block(
    prefixes: list[str],
) -> None:
    mixed = blend(prefixes, [6.0, 3.0, 1.0])
    part, index = mixed.places(range(5 * BLOCK))
    for start in range(0, 5 * BLOCK, BLOCK):
        counts = np.bincount(part[start : start + BLOCK], minlength=3)
        assert np.abs(counts - BLOCK * np.array([0.6, 0.3, 0.1])).max() < 2
    for i in range(3):
        assert sorted(index[part == i]) == list(range((part == i).sum())), (
            "each is given once, and none is left out"
        )
    assert len(set(part[:20])) > 1, "corpora are mixed within a block"


def test_blend_sample_depends_on_number_only(prefixes: list[str]) -> None:
    mixed = blend(prefixes, [1.0, 1.0, 1.0])
    numbers = [3, 10**9, BLOCK, 0, 7 * BLOCK + 5]
    together = mixed.batch(numbers)
    assert all((mixed.batch([n])[0] == row).all() for n, row in zip(numbers, together, strict=True))
    part, _ = mixed.places(numbers)
    assert (together // STEP == part[:, None]).all()
    assert not (
        blend(prefixes, [1.0, 1.0, 1.0], seed=2).batch(range(50)) == mixed.batch(range(50))
    ).all()


def test_blend_micro_batches_are_rank_independent(prefixes: list[str]) -> None:
    data = config(prefixes, blend_weights=[1.0, 2.0, 1.0])
    train = open_splits(data, 60_000, 5, prepare(data)).train
    one = [m["tokens"] for m in GlobalBatches(train, 16, 2, 0, 1).microbatches(32)]
    ranks = [
        [m["tokens"] for m in GlobalBatches(train, 16, 2, r, 2).microbatches(32)] for r in (0, 1)
    ]
    assert all((one[2 * m + r] == ranks[r][m]).all() for m in range(4) for r in (0, 1))


def test_blend_splits_and_weights_follow_tokens(
    prefixes: list[str],
) -> None:
    data = config(prefixes)
    splits = open_splits(data, 60_000, 5, prepare(data), need=("train",))
    assert isinstance(splits.train, Blend)
    assert splits.train.shares == pytest.approx(np.array([4000, 2000, 800]) / 6800)
    assert splits.describe()["tokens"] == 6800
    assert [p.documents for p in splits.train.parts] == [range(320), range(160), range(64)]
    assert splits.dataset is None


def test_blend_corpus_order_is_part_of_the_data(prefixes: list[str]) -> None:
    data = config(prefixes)
    turned = config(prefixes[::-1])
    saved = open_splits(data, 60_000, 5, prepare(data), need=("train",)).describe()
    same_data(saved, open_splits(data, 60_000, 5, prepare(data), need=("train",)).describe())
    with pytest.raises(ConfigError, match="not the one"):
        same_data(
            saved, open_splits(turned, 60_000, 5, prepare(turned), need=("train",)).describe()
        )


def test_blend_small_part_is_named(tmp_path: Path, prefixes: list[str]) -> None:
    data = config([prefixes[0], corpus(tmp_path / "d", 0, 20)], seq_length=64)
    with pytest.raises(ConfigError, match="20 tokens"):
        open_splits(data, 60_000, 5, prepare(data), need=("train",))


def assert_has_a_working_fix(
    code: str, change: dict[str, object], prefixes: list[str], blend: list[str]
) -> None:
    """Change a valid blend, in which `P0` stands for the first of the prefixes, and apply the first
    fix of the problem with this code.
    """

    def real(value: object) -> object:
        if isinstance(value, list):
            return [real(item) for item in value]
        if isinstance(value, str) and value[0] == "P":
            return prefixes[int(value[1])] + value[2:]
        return value

    base = {
        "data.kind": "indexed",
        "data.blend": blend,
        "data.seq_length": 16,
        "model.vocab_size": 60_000,
        "trainer.eval_iters": 0,
    }
    raw = apply(tiny(), base)
    assert errors(raw) == []
    raw = apply(raw, {key: real(value) for key, value in change.items()})
    found = [p for p in errors(raw) if p.code == code]
    assert found, errors(raw)
    assert code not in {p.code for p in errors(apply(raw, first_fix(found[0])))}


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("MT316", {"data.path": "P0"}),
        ("MT317", {"data.blend": ["P0", "P1", "P0"]}),
        ("MT306", {"data.blend": ["P0", "P1x"]}),
        ("MT150", {"data.kind": "mock", "data.split": [0.9, 0.1, 0.0]}),
        ("MT150", {"data.blend": None, "data.path": "P0", "data.blend_weights": [1.0]}),
    ],
)
def test_blend_impossible_has_a_working_fix(
    code: str, change: dict[str, object], prefixes: list[str]
) -> None:
    assert_has_a_working_fix(code, change, prefixes, prefixes)


@pytest.mark.parametrize("weights", [None, [0.7, 0.2, 0.1], [3.0, 1.0, 1.0]])
def test_blend_flag_round_trips(weights: list[float] | None, prefixes: list[str]) -> None:
    change = {"data.kind": "indexed", "data.blend": prefixes, "data.blend_weights": weights}
    raw = apply(tiny(trainer__sample_tokens=0, parallel__ranks=1), change)
    text = export_script(resolve(raw, LAPTOP))
    back = import_texts([(text, "s.sh")], "s").run.data
    assert (list(back.blend or ()), back.path) == (prefixes, None)
    assert (None if back.blend_weights is None else list(back.blend_weights)) == weights
    assert "#" not in text.split("--data-path")[1].splitlines()[0]


def parts_of(prefixes: list[str], seed: int = 1) -> list[Samples]:
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    return [Samples(d, range(d.num_documents), L, seed, True, 60_000) for d in sets]


def counts(mixed: Blend, numbers: range) -> np.ndarray:
    part, _ = mixed.places(numbers)
    return np.bincount(part, minlength=len(mixed.parts))


def gapless(mixed: Blend, samples: int) -> None:
    """Check that every part gives its own samples 0, 1, 2, ..., each once, up to the end of the
    block of the last sample.
    """
    stretch = next(s for s in reversed(mixed.stretches) if s.first < samples)
    block = int(stretch.block_of(np.array([samples - 1 - stretch.first]))[0])
    part, index = mixed.places(range(stretch.first + stretch.bounds(block)[1]))
    for i in range(len(mixed.parts)):
        assert sorted(index[part == i]) == list(range((part == i).sum()))


def test_blend_exact_sizes_are_shares_of_the_rest(prefixes: list[str]) -> None:
    sizes = (3000, 1700, 1)
    mixed = Blend(parts_of(prefixes), by_sizes(sizes), 1)
    assert counts(mixed, range(sum(sizes))).tolist() == list(sizes)
    gapless(mixed, 9000)
    later = counts(mixed, range(sum(sizes), 4 * sum(sizes)))
    assert np.abs(later / later.sum() - np.array(sizes) / sum(sizes)).max() < 0.01


def test_blend_curriculum_weights_start_at_their_sample(prefixes: list[str]) -> None:
    plan = [
        (0, [1.0, 1.0, 0.0]),
        (1500, [0.0, 0.2, 0.8]),
        (1510, [1.0, 0.0, 0.0]),
        (7000, [1.0, 2.0, 1.0]),
    ]
    mixed = Blend(parts_of(prefixes), plan, 1)
    assert counts(mixed, range(1500)).tolist() == [750, 750, 0]
    assert counts(mixed, range(1500, 1510)).tolist() == [0, 2, 8]
    assert counts(mixed, range(1510, 7000)).tolist() == [5490, 0, 0]
    assert (
        np.abs(counts(mixed, range(7000, 7000 + 4 * BLOCK)) - BLOCK * np.array([1, 2, 1])).max()
        <= 1
    )
    gapless(mixed, 12_000)
    assert (mixed.batch([8000, 3])[1] == mixed.batch([3])[0]).all()


def test_blend_exhausted_corpus_leaves_shares_of_others(
    prefixes: list[str],
) -> None:
    parts = parts_of(prefixes)
    most = [None, len(parts[1]) // 2, 3 * len(parts[2])]
    mixed = Blend(parts, [1.0, 1.0, 2.0], 1, most=most)
    assert mixed.total is None
    given_ = counts(mixed, range(5000))
    assert [
        m - 2 <= n <= m
        for n, m in zip(given_[1:], (len(parts[1]) // 2, 3 * len(parts[2])), strict=True)
    ]
    gapless(mixed, 5000)
    first = counts(mixed, range(100))
    assert first[2] > first[0] > 0 < first[1]


def test_blend_exhausted_corpora_end_the_data(prefixes: list[str]) -> None:
    parts = parts_of(prefixes)
    most = [len(part) for part in parts]
    mixed = Blend(parts, [1.0, 5.0, 1.0], 1, most=most)
    assert mixed.total is not None
    assert sum(most) - 6 <= mixed.total <= sum(most)
    gapless(mixed, mixed.total)
    with pytest.raises(
        ConfigError, match=r"has \d+ samples before every corpus has had its epochs"
    ):
        mixed.batch([mixed.total])
    data = config(prefixes, blend_max_epochs=[1.0, 1.0, 1.0])
    with pytest.raises(
        ConfigError, match=r"blend_max_epochs=\[1\.0, 1\.0, 1\.0\]: .* the run needs 5000"
    ):
        open_splits(data, 60_000, 5, prepare(data), ("train",), (5000, 1, 1))
    open_splits(data, 60_000, 5, prepare(data), ("train",), (500, 1, 1))
    with pytest.raises(ValidationError, match="less than or equal to 1000000"):
        config(prefixes, blend_max_epochs=[1.0, 1.0, 1e300])


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4000), st.lists(st.sampled_from([0, 1, 3, 50]), min_size=3, max_size=3)
        )
    ),
    st.lists(st.none() | st.integers(1, 3000), min_size=3, max_size=3),
)
@settings(max_examples=15, deadline=None)
def test_blend_plan_gives_every_sample_once(
    later: list[tuple[int, list[int]]], most: list[int | None]
) -> None:
    plan = [(0, [2.0, 1.0, 1.0])]
    at = 0
    for length, weights in later:
        at += length
        if sum(weights):
            plan.append((at, [float(w) for w in weights]))
    mixed = Blend(parts_without_tokens(), plan, 1, most=most)
    samples = 6000 if mixed.total is None else mixed.total
    if samples:
        gapless(mixed, samples)
    for found, limit in zip(counts(mixed, range(samples)), most, strict=True):
        assert limit is None or found <= limit


def parts_without_tokens() -> list[Samples]:
    class Part:
        seq_length = L
        vocab_size = 60_000

        def __len__(self) -> int:
            return 1000

    return [Part(), Part(), Part()]  # type: ignore[list-item]


def test_blend_splits_may_have_own_corpora(prefixes: list[str]) -> None:
    data = DataConfig(
        kind="indexed",
        path=prefixes[0],
        seq_length=L,
        validation_blend=tuple(prefixes[1:]),
        validation_weights=(1, 3),
    )
    splits = open_splits(data, 60_000, 5, prepare(data))
    assert isinstance(splits.train, Samples)
    assert splits.train.num_tokens == 4000, "all of it is trained on"
    assert isinstance(splits.validation, Blend)
    assert splits.validation.shares.tolist() == [0.25, 0.75]
    assert set(np.unique(splits.validation.batch(range(60)) // STEP)) == {1, 2}
    assert splits.test is None
    assert splits.describe()["tokens"] == 6800
    other = data.model_copy(update={"validation_blend": (prefixes[1],), "validation_weights": None})
    with pytest.raises(ConfigError, match="not the one"):
        same_data(splits.describe(), open_splits(other, 60_000, 5, prepare(other)).describe())
    with pytest.raises(ConfigError, match="test has none"):
        open_splits(data, 60_000, 5, prepare(data), ("train", "test"))
    with pytest.raises(ConfigError, match=r"data\.validation_blend=.*no file nowhere"):
        prepare(data.model_copy(update={"validation_blend": (prefixes[1], "nowhere")}))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("MT351", {"data.blend_sizes": [5, 5]}),
        ("MT351", {"data.blend_max_epochs": [5.0, 5.0]}),
        ("MT351", {"data.validation_blend": ["P0"], "data.validation_weights": [1.0, 2.0]}),
        ("MT317", {"data.validation_blend": ["P0", "P0"], "data.validation_weights": [1.0, 2.0]}),
        ("MT352", {"data.blend_curriculum": [[0, [1.0, 0.0, 0.0]], [10, [0.0, 0.0, 0.0]]]}),
        ("MT353", {"data.blend_sizes": [5, 5, 5], "data.blend_weights": [1.0, 1.0, 1.0]}),
        ("MT354", {"data.blend_curriculum": [[0, [1.0, 0.0]]]}),
        ("MT354", {"data.blend_curriculum": [[3, [1.0, 0.0, 0.0]]]}),
        ("MT354", {"data.blend_curriculum": [[0, [1.0, 0.0, 0.0]], [0, [1.0, 1.0, 0.0]]]}),
        ("MT150", {"data.blend_sizes": [5, 5, 5], "data.order": "megatron"}),
        ("MT306", {"data.validation_blend": ["P0", "P1x"]}),
        ("MT605", {"data.validation_blend": ["P3"], "trainer.eval_iters": 1}),
        ("MT309", {"data.test_blend": ["P1"], "trainer.eval_iters": 1}),
    ],
)
def test_blend_impossible_plan_has_a_working_fix(
    code: str, change: dict[str, object], prefixes: list[str], tmp_path: Path
) -> None:
    few = corpus(tmp_path / "few", 0, 10)
    assert_has_a_working_fix(code, change, [*prefixes, few], prefixes[:3])


def test_blend_split_flags_round_trip(prefixes: list[str]) -> None:
    change: dict[str, object] = {"data.kind": "indexed", "data.path": prefixes[0]}
    change |= {"data.validation_blend": prefixes[1:]}
    change |= {"data.validation_weights": [1.0, 2.0]}
    raw = apply(tiny(trainer__sample_tokens=0, parallel__ranks=1), change)
    text = export_script(resolve(raw, LAPTOP))
    back = import_texts([(text, "s.sh")], "s").run.data
    assert (back.path, list(back.validation_blend or ()), back.test_blend) == (
        prefixes[0],
        prefixes[1:],
        None,
    )
    assert list(back.validation_weights or ()) == [1.0, 2.0]
    assert "--split" not in text


SMALL_SHARES = [
    [5_600_000.0, 1.0],
    [1e12, 1.0, 1e6],
    [1.0, 1e-9, 1e-9, 2.0, 1e-7],
    [15.6e12 / 234] * 234 + [2.8e6],
]


@pytest.mark.parametrize("weights", SMALL_SHARES, ids=["1.8e-7", "1e-12", "several", "235 corpora"])
def test_blend_small_share_is_given_over_a_long_run(
    weights: list[float],
) -> None:
    shares = np.array(weights) / sum(weights)
    one = Stretch(0, 0, None, shares, np.zeros(len(weights), np.int64))
    assert one.block == BLOCK, "a corpus of trillions is read in its own order"
    at = [0, BLOCK, 10**6, 10**6 + BLOCK, 10**9, 3 * 10**12]
    given_ = [one.given(samples) for samples in at]
    assert [int(counted.sum()) for counted in given_] == at
    assert all((after >= before).all() for before, after in pairwise(given_)), (
        "a part takes a sample back"
    )
    apart = [
        np.abs(n - shares * samples) / (9 + 1e-3 * shares * samples)
        for n, samples in zip(given_, at, strict=True)
    ]
    assert max(one.max() for one in apart) <= 1


def test_blend_small_share_keeps_order(
    prefixes: list[str],
) -> None:
    mixed = blend(prefixes, [2.0, 1.0, 1e-7])
    gapless(mixed, 4 * BLOCK)
    middle = int(0.5 * 3 / 1e-7)
    part, index = mixed.places(range(middle - BLOCK, middle + BLOCK))
    assert index[part == 2].tolist() == [0], (
        "its first sample comes after half of the samples of one"
    )
    assert mixed.describe()["dealt"] == "by halves"
    assert "dealt" not in blend(prefixes, [2.0, 1.0, 1e-5]).describe()


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_blend_zero_weight_equals_absence(order: str, prefixes: list[str]) -> None:
    with_it = config([*prefixes[:2], "/nowhere/corpus"], blend_weights=[2.0, 1.0, 0.0], order=order)
    without = config(prefixes[:2], blend_weights=[2.0, 1.0], order=order)
    one, other = (
        open_splits(d, 60_000, 5, prepare(d), ("train",), (300, 1, 1)) for d in (with_it, without)
    )
    assert (one.train.batch(range(300)) == other.train.batch(range(300))).all()
    assert one.corpus.meta["fingerprint"] == other.corpus.meta["fingerprint"]


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_blend_check_takes_tiny_share_and_reports_unread(
    order: str, prefixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ",".join(prefixes)
    words = [
        "data=indexed",
        f"data.blend=[{names}]",
        "data.seq_length=16",
        "model.vocab_size=60000",
    ]
    words += [f"data.order={order}", "trainer.eval_iters=0", "trainer.sample_tokens=0"]
    words += ["data.split=[1,0,0]"]

    def said(weights: str) -> tuple[int, dict[str, Any]]:
        code = main(["check", *words, f"data.blend_weights={weights}", "--json"])
        return code, json.loads(capsys.readouterr().out)

    assert said("[5600000,1,1e12]")[0] == 0
    assert said("[1,2]")[1]["problems"][0]["rule"].endswith("(2 weights for 3 corpora)")
    code, found = said("[3,0,1]")
    assert code == 0
    assert [(p["code"], prefixes[1] in p["rule"]) for p in found["problems"]] == [("MT319", True)]
    code, found = said("[3,1e-13,1]")
    assert code == 2
    fix = f"give {prefixes[1]} a larger weight, or 0, which leaves it out"
    assert found["problems"][0]["fix"] == fix, "no corpus is left out unless its weight is 0"
