"""Several corpora as one: which of them gives sample number g, and which of its samples, is computed from g alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from mtrain.data.permute import ROUNDS, Permutation, keys
from mtrain.data.samples import Samples

BLOCK = 1024
"""Samples in which every part has its share, at least."""


class Blend:
    """Samples of several parts in given shares, with the interface of `Samples`.

    Numbers are cut into blocks, in each of which the parts have their places in a keyed order. After any number of
    blocks each part has given its share to within one sample, and its own samples 0, 1, 2, ... without a gap.
    """

    def __init__(self, parts: Sequence[Samples], shares: Sequence[float], seed: int, name: str = "train") -> None:
        self.parts, self.seed, self.name = list(parts), seed, name
        self.seq_length, self.vocab_size = parts[0].seq_length, parts[0].vocab_size
        self.shares = np.array(shares, np.float64) / math.fsum(shares)
        self._ends = np.cumsum(self.shares)
        self._ends[-1] = 1.0
        # with two samples of the smallest part in a block, rounding never takes one away
        self._block = max(BLOCK, math.ceil(2 / float(self.shares.min())))
        self._order = functools.lru_cache(maxsize=8)(self._draw)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def _draw(self, block: int) -> Permutation:
        return Permutation(self._block, keys(self.seed, block, f"blend {self.name}", ROUNDS))

    def _given(self, block: int) -> np.ndarray:
        """How many samples each part has given before a block; int64 [parts]."""
        whole = np.floor(self._ends * (block * self._block)).astype(np.int64)
        return np.diff(whole, prepend=0)

    def places(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part of each sample and its number there; two int64 [n]."""
        blocks, places = np.divmod(np.asarray(numbers, np.int64), self._block)
        part, index = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks):
            rows = blocks == block
            before = self._given(int(block))
            quota = self._given(int(block) + 1) - before
            at = self._order(int(block))(places[rows])
            part[rows] = np.searchsorted(np.cumsum(quota), at, side="right")
            index[rows] = at - (np.cumsum(quota) - quota)[part[rows]] + before[part[rows]]
        return part, index

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Tokens of the samples with these numbers; int64 [n, seq_length + 1].

        Raises CorruptData for an id outside the vocabulary.
        """
        part, index = self.places(numbers)
        out = np.empty((len(part), self.seq_length + 1), np.int64)
        for i in np.unique(part):
            out[part == i] = self.parts[i].batch(index[part == i])
        return out

    def describe(self) -> dict[str, int]:
        """Counts over all parts: documents, tokens, samples until as many are given as they have."""
        counts = [part.describe() for part in self.parts]
        return {key: sum(count[key] for count in counts) for key in counts[0]}
