"""Fill in the middle (arXiv:2207.14255): a share of documents becomes prefix, suffix, middle.

As in Megatron-LM's GPTFIMDataset, each piece of a document in a sample is reordered by itself, and
the end of its suffix makes room for the three tokens that mark the parts, so that samples keep
their length. Boundaries fall between tokens.
"""

from __future__ import annotations

import numpy as np

from mtrain.data.samples.permutation import keys, mix64

MARKS = 3
_STEP = np.uint64(0x9E3779B97F4A7C15)


class FillInTheMiddle:
    """A function that moves the middle of documents to their end; it depends only on seed, split
    and sample number.

    `marks` are the ids of prefix, suffix and middle; `ends` the tokens that end a document. A piece
    is reordered with probability `rate`; a share `spm_rate` of those has the suffix before the
    prefix (variant 2 of the paper).
    """

    def __init__(
        self,
        rate: float,
        spm_rate: float,
        marks: tuple[int, int, int],
        ends: tuple[int, ...],
        seed: int,
        part: str,
    ) -> None:
        self.rate = rate
        self.spm_rate = spm_rate
        self.marks = marks
        self.ends = ends
        self._key = keys(seed, 0, f"fim {part}", 1)[0]

    def __call__(self, windows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return samples int64 [n, seq_length + 1], given their numbers int64 [n], reordered."""
        out = windows.copy()
        for row, window, number in zip(out, windows, numbers.tolist(), strict=True):
            cuts = (np.flatnonzero(np.isin(window, self.ends)) + 1).tolist()
            ends = [*(cut - 1 for cut in cuts), len(window)]
            for piece, (begin, end) in enumerate(zip([0, *cuts], ends, strict=True)):
                self._move(row[begin:end], self._words(number, piece))
        return out

    def _words(self, number: int, piece: int) -> np.ndarray:
        """Return the random words uint64 [4] of a piece of a sample."""
        base = mix64(
            mix64(np.array([number], np.uint64) ^ self._key) + np.array([piece], np.uint64) * _STEP
        )
        return mix64(base + np.arange(1, 5, dtype=np.uint64) * _STEP)

    def _move(self, piece: np.ndarray, words: np.ndarray) -> None:
        """Reorder a piece in place if its random words select it."""
        moved, suffix_first = (words[:2] >> np.uint64(11)) * 2.0**-53 < (self.rate, self.spm_rate)
        kept = len(piece) - MARKS
        if not moved or kept < 1:
            return
        first, second = sorted(int(word % np.uint64(kept + 1)) for word in words[2:])
        prefix = piece[:first]
        middle = piece[first:second]
        suffix = piece[second:kept]
        mark = [np.array([i], piece.dtype) for i in self.marks]
        if suffix_first:
            parts = [mark[0], mark[1], suffix, mark[2], prefix, middle]
        else:
            parts = [mark[0], prefix, mark[1], suffix, mark[2], middle]
        piece[:] = np.concatenate(parts)
