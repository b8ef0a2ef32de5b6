"""Whole documents side by side: nothing is lost, nothing is read twice, and any order is computed
again the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.schema.data import DataConfig
from mtrain.data import Splits, open_splits, prepare
from mtrain.data.batch import GlobalBatches, document_collator
from mtrain.data.samples import whole_documents
from mtrain.data.samples.packing import first_fit, first_fits
from mtrain.data.store.indexed import IndexedWriter, write_index
from mtrain.errors import ConfigError, CorruptData

S = 16
WHOLE: dict[str, Any] = {
    "kind": "indexed",
    "packed": True,
    "packed_by": "first_fit",
    "seq_length": S,
}


def corpus(home: Path, lengths: list[int], name: str = "corpus") -> Path:
    """Write a corpus of documents of these lengths with distinct tokens: their positions in it."""
    with IndexedWriter(home / name, np.dtype("<i4")) as writer:
        writer.add(np.arange(sum(lengths)), np.array(lengths, np.int64))
    return home / name


def opened(prefix: Path, **more: Any) -> Splits:
    given = {
        "path": str(prefix),
        "split": (1.0, 0.0, 0.0),
        "cache_dir": str(prefix.parent / "cache"),
        **WHOLE,
        **more,
    }
    data = DataConfig(**given)
    return open_splits(data, 1 << 20, 7, prepare(data, lambda note: None), ("train",))


def learned(splits: Splits, numbers: range, micro: int = 1) -> Counter[tuple[int, int]]:
    """Count the predictions that contribute to the loss, by input token and label."""
    source = splits.train
    batches = GlobalBatches(
        source, len(numbers), micro, 0, 1, document_collator(source)
    ).microbatches(numbers.start)  # type: ignore[arg-type]
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        tokens, labels, mask = (batch[key][0].tolist() for key in ("tokens", "labels", "loss_mask"))  # type: ignore[literal-required]
        bounds = batch["cu_seqlens"].tolist()
        places = [
            i - start for start, stop in itertools.pairwise(bounds) for i in range(start, stop)
        ]
        assert batch["position_ids"][0].tolist() == places
        for i, counts in enumerate(mask):
            if counts:
                found[tokens[i], labels[i]] += 1
                # all of what it sees is of its own document, from a whole piece on
                first = tokens[i] - places[i]
                assert tokens[i - places[i]] == first
    return found


def wanted(lengths: list[int]) -> Counter[tuple[int, int]]:
    """Count each token of a document but the first, after the one before it."""
    ends = np.cumsum([0, *lengths]).tolist()
    return Counter((t, t + 1) for a, b in itertools.pairwise(ends) for t in range(a, b - 1))


HOSTILE = {
    "empty, and of one token": [0, 1, 0, 2, 1, 1, 3, 0],
    "as long as a sample, and near it": [
        S - 1,
        S,
        S + 1,
        S + 2,
        2 * S - 1,
        2 * S,
        2 * S + 1,
        2 * S + 2,
        1,
        0,
    ],
    "one": [2],
    "one much longer than a sample": [7 * S + 5],
    "pieces that leave one prediction": [S + 2, 2, S + 2, 2],
}


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("window", [1, 3, 2048])
@pytest.mark.parametrize("name", HOSTILE)
def test_whole_documents_predict_each_token_once_in_an_epoch(
    name: str, window: int, multiple: int | None, tmp_path: Path
) -> None:
    lengths = HOSTILE[name]
    splits = opened(corpus(tmp_path, lengths), packed_window=window, packed_multiple=multiple)
    count = len(splits.train)
    for epoch in range(3):
        assert learned(splits, range(epoch * count, (epoch + 1) * count)) == wanted(lengths)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3 * S), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 70),
)
def test_whole_documents_placement_equals_first_fit(
    lengths: list[int], multiple: int, window: int
) -> None:
    sizes = np.minimum(-(-np.array(lengths) // multiple) * multiple, S)
    groups = -(-len(sizes) // window)
    padded = np.zeros(groups * window, np.int64)
    padded[: len(sizes)] = sizes
    for row, found in zip(
        padded.reshape(groups, -1), first_fits(padded.reshape(groups, -1), S), strict=True
    ):
        order, starts = first_fit(row, S)
        one_by_one = np.empty(window, np.int64)
        one_by_one[order] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        assert (found == one_by_one)[row > 0].all()


LENGTHS = np.random.default_rng(3).integers(0, 40, 300).tolist()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("whole"), LENGTHS)


def test_whole_documents_counts_cover_cut_dropped_and_padded(prefix: Path) -> None:
    long = sum(n > S + 1 for n in LENGTHS)
    short = sum(n < 2 for n in LENGTHS)
    pieces = sum(-(-(n - 1) // S) for n in LENGTHS if n > S + 1)
    splits = opened(prefix)
    counts = splits.train.describe()
    assert (counts["cut"], counts["pieces"], counts["dropped"], counts["short"]) == (
        long,
        pieces,
        0,
        short,
    )
    rows = splits.train.batch(np.arange(len(splits.train)))[:, :-1]
    assert counts["padding"] == (rows < 0).sum()
    full = f"{1 - counts['padding'] / rows.size:.2%} full"
    assert [
        full in splits.remarks()[0],
        f"{long} documents of more than" in splits.remarks()[1],
    ] == [True, True]
    dropped = opened(prefix, long_documents="drop").train.describe()
    assert (dropped["cut"], dropped["pieces"], dropped["dropped"], dropped["short"]) == (
        0,
        0,
        long,
        short,
    )


def test_whole_documents_dropped_is_not_read(prefix: Path) -> None:
    splits = opened(prefix, long_documents="drop")
    ends = np.cumsum([0, *LENGTHS]).tolist()
    kept = [(a, b) for a, b in itertools.pairwise(ends) if b - a <= S + 1]
    assert learned(splits, range(len(splits.train))) == Counter(
        (t, t + 1) for a, b in kept for t in range(a, b - 1)
    )


def test_whole_documents_refused_states_its_length(prefix: Path) -> None:
    with pytest.raises(ConfigError) as error:
        opened(prefix, long_documents="refuse")
    (problem,) = error.value.problems
    longest = max(LENGTHS)
    assert problem.code == "MT641"
    assert f"document {LENGTHS.index(longest)}, has {longest}" in problem.rule
    assert opened(prefix, long_documents="refuse", seq_length=longest - 1)


def test_whole_documents_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    for name, lengths, more in (
        ("short", [1, 0, 1, 1], {}),
        ("long", [40, 1, 50], {"long_documents": "drop"}),
    ):
        with pytest.raises(ConfigError) as error:
            opened(corpus(tmp_path, lengths, name), **more)
        assert [problem.code for problem in error.value.problems] == ["MT605"]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_whole_documents_step_is_independent_of_dp_and_resume(dp: int, prefix: Path) -> None:
    def step(consumed: int, dp: int) -> list[list[int]]:
        source = opened(prefix).train
        ranks = [
            GlobalBatches(source, 8, 2, rank, dp, document_collator(source)) for rank in range(dp)
        ]  # type: ignore[arg-type]
        taken = [iter(rank.microbatches(consumed)) for rank in ranks]
        return [next(taken[m % dp])["tokens"].tolist()[0] for m in range(4)]

    count = len(opened(prefix).train)
    assert step(24, dp) == step(24, 1)
    assert step(count - 3, dp) == step(count - 3, 1)  # from one epoch into the next


def test_whole_documents_epochs_differ_with_each_sample_once(prefix: Path) -> None:
    source: Any = opened(prefix).train
    count = len(source)
    epochs = [[source.place(g) for g in range(e * count, (e + 1) * count)] for e in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == count


@pytest.fixture
def parts(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cut the corpus into parts of about 60 documents, in stretches of 6 or more."""
    monkeypatch.setattr(whole_documents, "PART", 60)
    monkeypatch.setattr(whole_documents, "STRETCH", 6)
    return prefix


def test_whole_documents_parts_are_fitted_lazily_without_loss(parts: Path) -> None:
    source: Any = opened(parts, packed_window=4).train
    assert source.fitted.parts == 5
    assert source.describe()["fitted"] < len(LENGTHS)
    source.batch([0, 1])
    assert len(source.fitted._samples) == 1
    again: Any = opened(parts, packed_window=4)
    count = len(again.train)
    assert again.train.describe()["fitted"] == len(LENGTHS)
    assert learned(again, range(count)) == wanted(LENGTHS)
    assert learned(again, range(count, 2 * count)) == wanted(LENGTHS)
    numbers = np.random.default_rng(0).permutation(3 * count)
    assert (source.batch(numbers) == again.train.batch(numbers)).all()


def test_whole_documents_part_is_cached(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = opened(parts, packed_window=4).train
    every = np.arange(len(made))
    monkeypatch.setattr(whole_documents.FittedDocuments, "_fill", None)
    again: Any = opened(parts, packed_window=4).train
    assert (made.batch(every) == again.batch(every)).all()
    assert isinstance(again.fitted.part(0)["starts"], np.memmap)
    assert made.describe() == again.describe()


def test_whole_documents_changed_index_is_refitted(parts: Path, tmp_path: Path) -> None:
    path = corpus(tmp_path, LENGTHS)
    before = len(opened(path, packed_window=4).train)
    write_index(tmp_path / "corpus.idx", np.array([sum(LENGTHS)]), np.dtype("<i4"))
    after = len(opened(path, packed_window=4).train)
    assert after == -(-(sum(LENGTHS) - 1) // S) != before


def test_whole_documents_blend_covers_its_corpora(tmp_path: Path) -> None:
    names = [str(corpus(tmp_path, LENGTHS[:100], "a")), str(corpus(tmp_path, LENGTHS[100:], "b"))]
    splits = opened(Path(names[0]), path=None, blend=names, blend_weights=(1.0, 3.0))
    source: Any = splits.train
    of_b = sum(source.place(g).startswith(names[1]) for g in range(200))
    assert 140 <= of_b <= 160
    assert sum(learned(splits, range(8), 2).values()) > 0
    assert "full" in splits.remarks()[0]


def test_whole_documents_unknown_id_has_its_place(prefix: Path) -> None:
    data = DataConfig(**WHOLE, path=str(prefix), split=(1.0, 0.0, 0.0))
    source = open_splits(data, 500, 7, prepare(data, lambda note: None), ("train",)).train
    whole = opened(prefix).train.batch(np.arange(len(source)))
    number = int(np.flatnonzero((whole == 500).any(axis=1))[0])
    with pytest.raises(CorruptData, match=r"offset 20[0-9]{2}: token id 50[0-9] in document"):
        source.batch([number])


def test_whole_documents_several_sequences_are_whole(tmp_path: Path) -> None:
    lengths = np.array([3, 4, 5, 6])
    documents = np.array([0, 0, 2, 2, 4, 4])
    path = corpus(tmp_path, lengths.tolist())
    write_index(tmp_path / "corpus.idx", lengths, np.dtype("<i4"), documents)
    splits = opened(path)
    assert learned(splits, range(len(splits.train))) == wanted([0, 7, 0, 11, 0])


def test_whole_documents_masked_token_has_no_loss_after(prefix: Path) -> None:
    source = opened(prefix).train
    numbers = np.arange(4)
    windows: Any = None
    plain, masked = (
        document_collator(source, eod)(windows, numbers)
        for eod in (None, int(source.batch([0])[0, 0]))
    )  # type: ignore[arg-type]
    assert int(plain["loss_mask"].sum() - masked["loss_mask"].sum()) == 1


@pytest.mark.parametrize(
    ("what", "said"), [("pointer", "pointer of sequence 150 is"), ("document", "less than")]
)
def test_whole_documents_large_index_is_sampled(
    what: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.data.store import indexed

    for name, value in (("LARGE", 10), ("PARTS", 2), ("PART", 4)):
        monkeypatch.setattr(indexed, name, value)
    path = corpus(tmp_path, LENGTHS)
    count = len(LENGTHS)
    assert opened(path)
    index = bytearray((tmp_path / "corpus.idx").read_bytes())
    at = indexed.HEADER.size + (4 * count + 8 * 150 if what == "pointer" else 12 * count + 8 * 150)
    index[at : at + 8] = np.array([4], "<i8").tobytes()
    (tmp_path / "corpus.idx").write_bytes(index)
    with pytest.raises(CorruptData, match=said):
        opened(path)
