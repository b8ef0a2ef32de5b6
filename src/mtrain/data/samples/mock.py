"""Synthetic tokens that a model can learn: random walks, a function of seed and sample number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain.config.schema.data import DataConfig
from mtrain.data.samples.permutation import keys, mix64
from mtrain.data.samples.token_stream import SHARES
from mtrain.data.samples.whole_documents import Fit, WholeDocuments

# The most tokens in use, so few that a small model learns the graph in some hundred steps
STATES = 256
# Tokens that end a document in packed samples: one in sixteen
DOCUMENT_ENDS = tuple(range(16))
# The probability of each of the four successors of a token: an entropy of 1.03 nats a token
LIKELIHOOD = (0.6, 0.25, 0.1, 0.05)
# Synthetic documents of a split of whole documents
DOCUMENTS = 1 << 14


class MockSamples:
    """Random walks with the interface of `Samples`, for all splits on one graph from the seed."""

    def __init__(self, seq_length: int, seed: int, vocab_size: int, name: str = "train") -> None:
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.name = name
        self._states = min(vocab_size, STATES)
        words = keys(seed, 0, "mock graph", self._states * len(LIKELIHOOD))
        self._next = (
            (words % np.uint64(self._states))
            .astype(np.int64)
            .reshape(self._states, len(LIKELIHOOD))
        )
        self._salt = keys(seed, 0, f"mock {name}", 1)
        self._limits = (np.cumsum(LIKELIHOOD)[:-1] * 2.0**64).astype(np.uint64)

    def __len__(self) -> int:
        # more than any run reads, so that no sample comes twice
        return 1 << 40

    def batch(self, numbers: Sequence[int] | np.ndarray, length: int | None = None) -> np.ndarray:
        """Return the tokens of samples; int64 [n, seq_length + 1], or [n, length]."""
        length = length or self.seq_length + 1
        each = mix64(np.asarray(numbers, np.int64).astype(np.uint64)[:, None] ^ self._salt)
        draws = mix64(each + np.arange(length, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        choices = np.searchsorted(self._limits, draws, side="right")
        out = np.empty(draws.shape, np.int64)
        out[:, 0] = (draws[:, 0] % np.uint64(self._states)).astype(np.int64)
        for t in range(1, length):
            out[:, t] = self._next[out[:, t - 1], choices[:, t]]
        return out

    def unigram_entropy_nats(self) -> float:
        """Return the entropy of the stationary distribution of the walk."""
        share = np.full(self._states, 1.0 / self._states)
        for _ in range(64):
            flow = share[:, None] * np.array(LIKELIHOOD)
            share = np.bincount(self._next.ravel(), weights=flow.ravel(), minlength=self._states)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    def describe(self) -> dict[str, int]:
        """Return the number of samples of an epoch."""
        return {"samples": len(self)}


def last_of(vocab_size: int) -> int:
    """Return the token that ends synthetic documents and occurs nowhere else in them."""
    return min(vocab_size, STATES) - 1


class MockDocuments:
    """Documents of random walks with the parts of `IndexedDataset` that `WholeDocuments` uses.

    They have 2 to 2 * seq_length + 1 tokens, distributed evenly over the logarithm of the length,
    so that some are longer than a sample.
    """

    idx = "synthetic documents"
    bin = idx
    prefix = idx
    dtype = np.dtype(np.int64)
    is_remote = False

    def __init__(self, seq_length: int, seed: int, vocab_size: int, name: str) -> None:
        self._walks = MockSamples(seq_length, seed, vocab_size, name)
        self._end = last_of(vocab_size)
        # the upper 53 bits, as many as a float64 holds, give a number in [0, 1)
        draws = (keys(seed, 0, f"mock lengths {name}", DOCUMENTS) >> np.uint64(11)) * 2.0**-53
        lengths = 1 + np.exp(draws * np.log(2.0 * seq_length)).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_documents = DOCUMENTS
        self.num_tokens = int(self._starts[-1])
        self.tokens = self

    def check_next(self) -> None:
        """Do nothing, as synthetic documents have no index."""

    def expect(self, starts: Sequence[int], length: int) -> None:
        """Do nothing, as synthetic documents are on no disk."""

    def document_start(self, document: int) -> int:
        """Return the place of a document's first token in the stream."""
        return int(self._starts[document])

    def document_starts(self, documents: range) -> np.ndarray:
        """Return the starts of consecutive documents, and the end of the last."""
        return self._starts[documents.start : documents.stop + 1]

    def document_at(self, place: int) -> int:
        """Return the document with the token at `place` of the stream."""
        return int(np.searchsorted(self._starts, place, side="right")) - 1

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the tokens between two places of the same document."""
        document = self.document_at(places.start)
        first, stop, end = (
            x - self.document_start(document)
            for x in (places.start, places.stop, self._starts[document + 1])
        )
        # a walk depends on its beginning, so it is computed from there
        tokens = self._walks.batch([document], stop)[0] % self._end
        if stop == end:
            tokens[-1] = self._end
        return tokens[first:]


def whole_documents(data: DataConfig, seed: int, vocab_size: int) -> dict[str, WholeDocuments]:
    """Return splits of packed synthetic documents."""
    fit = Fit.of(data)
    every = range(DOCUMENTS)
    made = {name: MockDocuments(data.length, seed, vocab_size, name) for name in SHARES}
    return {
        name: WholeDocuments(held, every, fit, seed, vocab_size, name)
        for name, held in made.items()
    }
