"""Synthetic tokens that can be learnt: walks through a random graph, a function of seed and sample number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain.data.permute import keys, mix64

STATES = 256
"""Tokens in use at most; so few that a small model learns the graph in some hundred steps."""
DOCUMENT_ENDS = tuple(range(16))
"""Tokens that end a document where samples are packed: one in sixteen."""
LIKELIHOOD = (0.6, 0.25, 0.1, 0.05)
"""How often the first, second, ... successor of a token follows it: an entropy of 1.03 nats a token."""


class MockSamples:
    """Random walks with the interface of `Samples`; all splits walk through one graph, drawn from the seed."""

    def __init__(self, seq_length: int, seed: int, vocab_size: int, name: str = "train") -> None:
        self.seq_length, self.seed, self.vocab_size, self.name = seq_length, seed, vocab_size, name
        self._states = min(vocab_size, STATES)
        words = keys(seed, 0, "mock graph", self._states * len(LIKELIHOOD))
        self._next = (words % np.uint64(self._states)).astype(np.int64).reshape(self._states, len(LIKELIHOOD))
        self._salt = keys(seed, 0, f"mock {name}", 1)
        self._limits = (np.cumsum(LIKELIHOOD)[:-1] * 2.0**64).astype(np.uint64)

    def __len__(self) -> int:
        return 1 << 40

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens of the samples with these numbers; int64 [n, seq_length + 1]."""
        each = mix64(np.asarray(numbers, np.int64).astype(np.uint64)[:, None] ^ self._salt)
        draws = mix64(each + np.arange(self.seq_length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        choices = np.searchsorted(self._limits, draws, side="right")
        out = np.empty(draws.shape, np.int64)
        out[:, 0] = (draws[:, 0] % np.uint64(self._states)).astype(np.int64)
        for t in range(1, self.seq_length + 1):
            out[:, t] = self._next[out[:, t - 1], choices[:, t]]
        return out

    def unigram_entropy_nats(self) -> float:
        """Entropy of the distribution of tokens that long walks end in."""
        share = np.full(self._states, 1.0 / self._states)
        for _ in range(64):
            flow = share[:, None] * np.array(LIKELIHOOD)
            share = np.bincount(self._next.ravel(), weights=flow.ravel(), minlength=self._states)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    def describe(self) -> dict[str, int]:
        """Counts: samples of an epoch."""
        return {"samples": len(self)}
