"""Fill in the middle (arXiv:2207.14255): a share of documents is read as prefix, suffix and then
the middle.

As in Megatron-LM's GPTFIMDataset each piece of a document that lies in a sample is moved for
itself, and the end of its suffix is left out for the three tokens that mark the parts, so that
samples keep their length. Boundaries fall between tokens.
"""

from __future__ import annotations

import numpy as np

from mtrain.data.permute import keys, mix64

MARKS = 3
_STEP = np.uint64(0x9E3779B97F4A7C15)


class FillInTheMiddle:
    """Moves the middle of documents behind their end; a function of seed, split, and the number of
    a sample alone.

    `marks` are the ids of prefix, suffix and middle; `ends` the tokens that end a document. A piece
    is moved with probability `rate`, and of those moved `spm_rate` have the suffix before the
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
        """Return samples int64 [n, seq_length + 1] with their global numbers int64 [n], of the
        same shape.
        """
        out = windows.copy()
        for row, window, number in zip(out, windows, numbers.tolist(), strict=True):
            cuts = (np.flatnonzero(np.isin(window, self.ends)) + 1).tolist()
            ends = [*(cut - 1 for cut in cuts), len(window)]
            for piece, (begin, end) in enumerate(zip([0, *cuts], ends, strict=True)):
                self._move(row[begin:end], self._words(number, piece))
        return out

    def _words(self, number: int, piece: int) -> np.ndarray:
        """uint64 [4] that a piece of a sample draws from."""
        base = mix64(
            mix64(np.array([number], np.uint64) ^ self._key) + np.array([piece], np.uint64) * _STEP
        )
        return mix64(base + np.arange(1, 5, dtype=np.uint64) * _STEP)

    def _move(self, piece: np.ndarray, words: np.ndarray) -> None:
        """Move the middle of a piece, in place, where its draws say so."""
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
