"""The corpus of each sample of a blend in Megatron's order: the one furthest behind its weight.

Sample i comes from the corpus d with the largest w_d * max(i, 1) - n_d, where n_d is the number of
samples that d gave before, and the lowest d of several. A sample depends on all before it, so the
counts n at regular places are computed once, as far as samples are needed. Many pieces are computed
at a time: from guessed counts, a piece soon reaches the counts of the whole sequence, and it is
accepted only if the piece before it ends with the counts that it began with.
"""

from __future__ import annotations

import functools

import numpy as np

BLOCK = 4096
"""Samples between two places whose counts are stored."""
LANES = 1024
"""The most pieces that are computed at once."""
FEWEST = 64
LONGEST = 1 << 17
"""The most samples of a piece; for smaller shares than a few samples of it, guesses fail and the
pieces are computed one after another.
"""


class Greedy:
    """The map of a sample to its corpus and number there, for `weights` that add up to one."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = np.asarray(weights, np.float64)
        settled = 2 / max(float(self.weights.min()), 1e-9)
        self._piece = BLOCK * int(min(max(1, -(-settled // BLOCK)), LONGEST // BLOCK))
        self._known = [np.zeros(len(self.weights), np.int64)]
        self._lanes = LANES
        self._block = functools.lru_cache(maxsize=16)(self._computed)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each sample and its number there; two int64 [n]."""
        blocks, places = np.divmod(np.asarray(numbers, np.int64), BLOCK)
        part = np.empty_like(places)
        index = np.empty_like(places)
        for block in np.unique(blocks):
            rows = blocks == block
            parts, indices = self._block(int(block))
            part[rows] = parts[places[rows]]
            index[rows] = indices[places[rows]]
        return part, index

    def given(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples each corpus gives; int64 [corpora]."""
        block, rest = divmod(samples, BLOCK)
        self._extend(block)
        parts = self._block(block)[0][:rest]
        return self._known[block] + np.bincount(parts, minlength=len(self.weights))

    def _computed(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus and the number of each sample of a block."""
        self._extend(block)
        before = self._known[block]
        counts = before[None].astype(np.float64)
        picks = _run(self.weights, counts, np.array([block * BLOCK]), BLOCK)[:, 0].astype(np.int64)
        index = np.empty_like(picks)
        for d in np.unique(picks):
            rows = picks == d
            index[rows] = before[d] + np.arange(int(rows.sum()))
        return picks, index

    def _extend(self, block: int) -> None:
        """Compute the counts up to the beginning of a block and some more."""
        if block < len(self._known):
            return
        self._known = list(self._known)
        while len(self._known) <= block:
            pieces = -(-(block - len(self._known) + 1) * BLOCK // self._piece)
            kept = self._side_by_side(min(self._lanes, max(pieces, FEWEST)))
            self._lanes = max(1, min(LANES, 2 * kept))

    def _side_by_side(self, lanes: int) -> int:
        """Compute `lanes` pieces from the last known place on; return how many were
        guessed right.
        """
        origin = (len(self._known) - 1) * BLOCK
        firsts = origin + self._piece * np.arange(lanes, dtype=np.int64)
        counts = np.empty((lanes, len(self.weights)), np.float64)
        early = firsts - self._piece
        counts[0] = self._known[-1]
        if lanes > 1:
            counts[1:] = _likely(self.weights, early[1:])
            moving = counts[1:]
            _run(self.weights, moving, early[1:], self._piece)
        begun = counts.copy()
        kept = np.empty((self._piece // BLOCK, lanes, len(self.weights)), np.int64)
        for i in range(len(kept)):
            _run(self.weights, counts, firsts + i * BLOCK, BLOCK)
            kept[i] = counts
        right = int(np.argmin(np.append((counts[:-1] == begun[1:]).all(axis=1), False))) + 1
        for lane in range(right):
            self._known += [kept[i, lane].copy() for i in range(len(kept))]
        return right


def _likely(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return a guess of the counts [n, corpora] after `samples` [n]; it adds up to them."""
    exact = weights * samples[:, None].astype(np.float64)
    counts = np.floor(exact)
    missing = samples - counts.sum(axis=1).astype(np.int64)
    rank = (counts - exact).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def _run(weights: np.ndarray, counts: np.ndarray, firsts: np.ndarray, steps: int) -> np.ndarray:
    """Continue the rows of `counts` [n, corpora] in place from samples `firsts` [n]; return the
    picks int16 [steps, n].
    """
    rows = np.arange(len(counts))
    picks = np.empty((steps, len(counts)), np.int16)
    error = np.empty_like(counts)
    for step in range(steps):
        reached = np.maximum(firsts + step, 1).astype(np.float64)
        np.multiply(weights, reached[:, None], out=error)
        error -= counts
        pick = error.argmax(axis=1)
        counts[rows, pick] += 1.0
        picks[step] = pick
    return picks
