"""Samples and micro-batches: a pure function of the number of samples consumed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.config.schema.data import DataConfig
from mtrain.data import open_splits, prepare
from mtrain.data.batch import GlobalBatches, next_token_collator
from mtrain.data.samples.mock import MockSamples
from mtrain.data.samples.token_stream import Samples, entropy_nats, split_documents
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter
from mtrain.errors import ConfigError, CorruptData

L = 8
VOCAB = 60_000


def corpus(prefix: Path, lengths: list[int], dtype: str = "<u2") -> IndexedDataset:
    """Write documents whose tokens are their positions in the stream."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        writer.add(np.arange(sum(lengths)), np.array(lengths))
    return IndexedDataset(prefix)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return corpus(tmp_path / "a", [50, 3, 100, 1, 200, 77, 300, 20, 40, 209])


def samples(
    dataset: IndexedDataset, seed: int = 1, shuffle: bool = True, documents: range | None = None
) -> Samples:
    return Samples(dataset, documents or range(dataset.num_documents), L, seed, shuffle, VOCAB)


def test_samples_epoch_covers_every_window_once(dataset: IndexedDataset) -> None:
    s = samples(dataset)
    shifts = set()
    for epoch in range(6):
        starts = np.sort(s.starts(range(epoch * len(s), (epoch + 1) * len(s))))
        assert (np.diff(starts) == L).all()
        assert 0 <= starts[0] < L
        assert starts[-1] + L + 1 <= dataset.num_tokens
        shifts.add(int(starts[0]))
    assert len(s) == (1000 - L) // L
    assert len(shifts) > 2


def test_samples_epochs_differ_in_order(dataset: IndexedDataset) -> None:
    s = samples(dataset)
    first, second = (s.starts(range(e * len(s), (e + 1) * len(s))) for e in (0, 1))
    assert (first // L == second // L).mean() < 0.2


def test_samples_batch_holds_consecutive_tokens(dataset: IndexedDataset) -> None:
    s = samples(dataset)
    numbers = [0, 5, len(s) - 1, len(s), 10**12]
    batch = s.batch(numbers)
    assert batch.dtype == np.int64
    assert batch.tolist() == [list(range(a, a + L + 1)) for a in s.starts(numbers)]


def test_samples_validation_uses_every_window_in_order(dataset: IndexedDataset) -> None:
    s = samples(dataset, shuffle=False, documents=range(2, 5))
    assert len(s) == (301 - 1) // L
    assert s.batch(range(len(s) + 1))[:, 0].tolist() == [53 + L * i for i in range(len(s))] + [53]


@settings(max_examples=60, deadline=None)
@given(st.integers(L + 1, 4 * L), st.booleans(), st.integers(0, 50))
def test_samples_tiny_split_works(tokens: int, shuffle: bool, seed: int) -> None:
    class Stub:
        num_documents = 1

        def __init__(self, num_tokens: int) -> None:
            self.num_tokens = num_tokens

        def document_start(self, document: int) -> int:
            return self.num_tokens * document

    s = Samples(Stub(tokens), range(1), L, seed, shuffle, VOCAB)  # type: ignore[arg-type]
    starts = s.starts(range(3 * len(s)))
    assert len(s) >= 1
    assert starts.min() >= 0
    assert starts.max() + L + 1 <= tokens


def test_samples_too_small_split_states_numbers(tmp_path: Path) -> None:
    dataset = corpus(tmp_path / "a", [5, 3])
    with pytest.raises(ConfigError) as caught:
        samples(dataset)
    (problem,) = caught.value.problems
    assert problem.path == "data.seq_length"
    assert "has 8 tokens in 2 documents, one sample needs 9" in problem.rule
    assert "larger corpus" in problem.fix


@pytest.mark.parametrize(("dtype", "bad"), [("<u2", 700), ("<i4", -1)])
def test_samples_unknown_id_is_named_with_document(tmp_path: Path, dtype: str, bad: int) -> None:
    tokens = np.zeros(64, np.int64)
    tokens[30] = bad
    with IndexedWriter(tmp_path / "a", np.dtype(dtype)) as writer:
        writer.add(tokens, np.array([20, 20, 24]))
    s = Samples(IndexedDataset(tmp_path / "a"), range(3), L, 1, False, 700, "validation")
    s.batch([0, 1, 2])
    with pytest.raises(CorruptData) as caught:
        s.batch([2, 3])
    for words in (
        f"token id {bad}",
        "document 1",
        "validation sample 3",
        "ids 0 to 699",
        f"offset {30 * int(dtype[2])}",
    ):
        assert words in str(caught.value)


def test_samples_splits_follow_tokens_and_documents(dataset: IndexedDataset) -> None:
    assert split_documents(dataset, (0.7, 0.2, 0.1)) == [range(7), range(7, 9), range(9, 10)]
    assert split_documents(dataset, (7, 2, 1)) == split_documents(dataset, (0.7, 0.2, 0.1))
    assert split_documents(dataset, (1, 0, 0)) == [range(10), range(10, 10), range(10, 10)]
    assert split_documents(dataset, (0, 0, 1)) == [range(0), range(0), range(10)]
    assert split_documents(dataset, (0.98, 0.01, 0.01)) == [range(8), range(8, 9), range(9, 10)]
    with pytest.raises(ConfigError, match="all shares are zero"):
        split_documents(dataset, (0, 0, 0))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.tuples(*[st.floats(0, 1)] * 3))
def test_samples_splits_partition_without_wanted_empty(
    lengths: list[int], shares: tuple[float, ...]
) -> None:
    class Stub:
        num_documents = len(lengths)
        num_tokens = sum(lengths)

        def document_start(self, document: int) -> int:
            return sum(lengths[:document])

    if sum(shares) <= 0:
        return
    parts = split_documents(Stub(), shares)  # type: ignore[arg-type]
    assert [d for part in parts for d in part] == list(range(len(lengths)))
    if len(lengths) >= 3:
        assert all(len(part) > 0 for part, share in zip(parts, shares, strict=True) if share > 0)


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro", [1, 2])
def test_samples_step_is_independent_of_dp(dataset: IndexedDataset, dp: int, micro: int) -> None:
    s = samples(dataset)
    ranks = [GlobalBatches(s, 24, micro, rank, dp) for rank in range(dp)]
    for consumed in (0, 24, 10**9):
        numbers = np.concatenate([r.numbers(consumed).ravel() for r in ranks])
        assert sorted(numbers.tolist()) == list(range(consumed, consumed + 24))
        # In micro-batch m the ranks together read the next micro * dp samples.
        both = np.stack([r.numbers(consumed) for r in ranks], axis=1)
        assert both.ravel().tolist() == list(range(consumed, consumed + 24))


def test_samples_resume_equals_uninterrupted(dataset: IndexedDataset, tmp_path: Path) -> None:
    steps = len(samples(dataset)) // 4 + 9
    through = GlobalBatches(samples(dataset), 8, 2, 1, 2)
    expected = [through.microbatches(8 * step) for step in range(steps)]
    for stop in (1, steps // 2, steps - 1):
        again = GlobalBatches(samples(IndexedDataset(tmp_path / "a")), 8, 2, 1, 2)
        for a, b in zip(again.microbatches(8 * stop), expected[stop], strict=True):
            assert all(torch.equal(a[key], b[key]) for key in b)


def test_samples_labels_are_next_tokens(dataset: IndexedDataset) -> None:
    batches = GlobalBatches(samples(dataset), 12, 3, 0, 2).microbatches(0)
    assert len(batches) == 2
    for batch in batches:
        assert torch.equal(batch["labels"], batch["tokens"] + 1)
        assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
        assert batch["loss_mask"].tolist() == [[1.0] * L] * 3
        assert batch["position_ids"].tolist() == [list(range(L))] * 3
        assert [batch[k].dtype for k in ("tokens", "labels", "loss_mask", "position_ids")] == [
            torch.int64,
            torch.int64,
            torch.float32,
            torch.int64,
        ]
        assert all(t.shape == (3, L) and t.is_contiguous() for t in batch.values())  # type: ignore[attr-defined]


def test_samples_masked_end_of_document_has_no_loss(dataset: IndexedDataset) -> None:
    s = samples(dataset, shuffle=False)
    (batch,) = GlobalBatches(s, 2, 2, 0, 1, next_token_collator(masked_eod=3)).microbatches(0)
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1, 1, 1], [1] * 8]


def test_samples_indivisible_batch_suggests_divisible(
    dataset: IndexedDataset,
) -> None:
    with pytest.raises(ConfigError) as caught:
        GlobalBatches(samples(dataset), 14, 2, 0, 3)
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == (
        "trainer.global_batch_size",
        "trainer.global_batch_size=12",
    )
    assert "2 * 3 = 6" in problem.rule


def test_samples_synthetic_tokens_follow_seed_and_are_learnable() -> None:
    a = MockSamples(32, 7, 5000)
    b = MockSamples(32, 7, 5000)
    assert (a.batch([3, 99, 10**12]) == b.batch([3, 99, 10**12])).all()
    assert (a.batch([99])[0] == b.batch([1, 99])[1]).all()
    assert (a.batch([0]) != MockSamples(32, 8, 5000).batch([0])).any()
    assert (a.batch([0]) != MockSamples(32, 7, 5000, "validation").batch([0])).any()
    tokens = MockSamples(512, 7, 5000).batch(range(200))
    assert tokens.min() >= 0
    assert tokens.max() < 256
    pairs = np.bincount((tokens[:, :-1] * 256 + tokens[:, 1:]).ravel(), minlength=256 * 256)
    unigram = entropy_nats(np.bincount(tokens[:, :-1].ravel()))
    assert abs(unigram - a.unigram_entropy_nats()) < 0.1
    assert entropy_nats(pairs) - unigram < 1.1 < unigram - 3


def test_samples_synthetic_tokens_fit_small_vocabulary() -> None:
    assert MockSamples(32, 7, 10).batch(range(50)).max() < 10


def test_samples_mock_splits_open_without_files() -> None:
    data = DataConfig(kind="mock", seq_length=16)
    splits = open_splits(data, 1000, 1, prepare(data))
    assert splits.train.batch([0, 1]).shape == (2, 17)
    assert splits.tokenizer is None
    assert splits.eod is None
    assert splits.describe()["kind"] == "mock"


def test_samples_unneeded_share_may_be_too_small(dataset: IndexedDataset, tmp_path: Path) -> None:
    data = DataConfig(
        kind="indexed", path=str(tmp_path / "a"), seq_length=45, split=(0.9, 0.09, 0.01)
    )
    corpus_ = prepare(data)
    splits = open_splits(data, VOCAB, 1, corpus_, need=("train",))
    assert splits.validation is None
    assert splits.describe()["validation"] is None
    with pytest.raises(ConfigError, match="the validation split has"):
        open_splits(data.model_copy(update={"split": (1.0, 0.0, 0.0)}), VOCAB, 1, corpus_)


def test_samples_unigram_entropy_uses_validation_split(
    tmp_path: Path,
) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        for _ in range(10):
            writer.add(np.arange(100) % 4)
    data = DataConfig(
        kind="indexed", path=str(tmp_path / "a"), seq_length=10, split=(0.5, 0.5, 0.0)
    )
    assert open_splits(data, 4, 1, prepare(data)).unigram_entropy_nats == pytest.approx(np.log(4))
    with pytest.raises(CorruptData, match="ids 0 to 3; the vocabulary has 0 to 2"):
        _ = open_splits(data, 3, 1, prepare(data)).unigram_entropy_nats


def test_samples_mask_without_known_end_is_refused(dataset: IndexedDataset, tmp_path: Path) -> None:
    data = DataConfig(kind="indexed", path=str(tmp_path / "a"), seq_length=8, eod_mask_loss=True)
    with pytest.raises(
        ConfigError,
        match=r"data.eod_mask_loss=true: cannot mask the ends of documents because no end",
    ):
        open_splits(data, VOCAB, 1, prepare(data), need=("train",))
