"""GPT samples without an index: the tokens of sample number g are computed from g.

The documents of a split are one stream of tokens. In epoch e it is cut into windows of seq_length +
1 tokens with a stride of seq_length (the last token of a window is the first of the next: it is
predicted in one and read in the other), starting at a random offset below seq_length; the order of
the windows is a keyed permutation. So opening costs nothing, whatever the size of the corpus and
the number of epochs, and the position of a run is one integer: the number of samples consumed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mtrain.config.disk import token_files
from mtrain.data.samples.permutation import ROUNDS, Permutation, keys, mix64
from mtrain.data.store.indexed import IndexedDataset
from mtrain.errors import ConfigError, CorruptData, Problem

SHARES = ("train", "validation", "test")
# Tokens of a corpus in an object store that are checked before ranks start
REMOTE_CHECKED = 1 << 20
# Tokens that are checked at a time, so that they stay in the processor's cache
SCANNED = 1 << 22


def split_documents(dataset: IndexedDataset, shares: Sequence[float]) -> list[range]:
    """Cut the documents into consecutive ranges, one per share, as close to the shares of *tokens*
    as whole documents allow.

    A share above zero gets at least one document, if there are enough. Raises ConfigError if no
    share is above zero.
    """
    if sum(shares) <= 0:
        rule = "cannot divide the documents because all shares are zero"
        raise ConfigError.of("MT604", "data.split", list(shares), rule, "data.split=[1,0,0]")
    return token_files.split_documents(dataset, shares)


def split_records(count: int, shares: Sequence[float]) -> list[range]:
    """Cut `count` records into consecutive ranges by shares, one of which is above zero.

    A share above zero gets at least one record, if there are enough.
    """
    bounds = [round(cut) for cut in np.cumsum([0.0, *shares]) / sum(shares) * count]
    # from the last bound on, each one moves left to leave its share one record
    for i in reversed(range(1, len(shares))):
        bounds[i] = min(bounds[i], bounds[i + 1])
        if shares[i] > 0 and bounds[i + 1] == bounds[i] and bounds[i] > i:
            bounds[i] -= 1
    return [range(a, b) for a, b in pairwise(bounds)]


def entropy_nats(counts: np.ndarray) -> float:
    """Return the entropy in nats of the distribution of `counts`.

    It is the loss of the best model without context.
    """
    share = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(share * np.log(share)).sum())


class Samples:
    """The samples of a range of documents, in one epoch after another; `len` is the number of one.

    Without `shuffle`, the windows come in order, from the first token on. Raises ConfigError if the
    range is too small for one window.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        shuffle: bool,
        vocab_size: int,
        name: str = "train",
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        first = dataset.document_start(documents.start)
        self._take(
            dataset,
            documents,
            first,
            dataset.document_start(documents.stop),
            seq_length,
            vocab_size,
            name,
        )
        # Room of one window lets the grid shift by any offset below seq_length.
        spare = seq_length if shuffle else 1
        self._count = max(1, (self.num_tokens - spare) // seq_length)
        self._epoch = functools.lru_cache(maxsize=4)(self._draw)

    def _take(
        self,
        dataset: IndexedDataset,
        documents: range,
        first: int,
        end: int,
        seq_length: int,
        vocab_size: int,
        name: str,
        need: int | None = None,
    ) -> None:
        """Take the tokens of `documents`, from `first` to `end` of a corpus.

        They must be at least `need`, by default those of one sample.
        """
        self.dataset = dataset
        self.documents = documents
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.name = name
        self.first = first
        self.num_tokens = end - first
        need = seq_length + 1 if need is None else need
        if self.num_tokens < need:
            raise ConfigError([self._too_small(need)])

    def _too_small(self, need: int) -> Problem:
        if self.dataset.num_tokens >= 3 * need:
            fix = (
                f"a larger share for {self.name} in data.split ({', '.join(SHARES)}), or a smaller"
                " data.seq_length"
            )
        else:
            fix = "a larger corpus (data.path=...), or a smaller data.seq_length"
        return Problem(
            "MT605",
            "data.seq_length",
            self.seq_length,
            f"the {self.name} split has {self.num_tokens} tokens in {len(self.documents)}"
            f" documents, one sample needs {need} (the corpus: {self.dataset.num_tokens} tokens in"
            f" {self.dataset.num_documents} documents)",
            fix,
        )

    def __len__(self) -> int:
        return self._count

    def _draw(self, epoch: int) -> tuple[Permutation, int]:
        """Return the order of the windows of an epoch, and the place of the first in the split."""
        words = keys(self.seed, epoch, self.name, ROUNDS + 1)
        # the last window may not reach beyond the split
        room = min(self.seq_length, self.num_tokens - self._count * self.seq_length)
        return Permutation(self._count, words[:ROUNDS]), int(words[ROUNDS]) % room

    def starts(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the place in the corpus stream of the first token of each sample; int64 [n]."""
        epochs, places = np.divmod(np.asarray(numbers, np.int64), self._count)
        if not self.shuffle:
            return self.first + places * self.seq_length
        for epoch in np.unique(epochs):
            permutation, shift = self._epoch(int(epoch))
            rows = epochs == epoch
            places[rows] = shift + permutation(places[rows]) * self.seq_length
        return self.first + places

    def tokens_of(self, number: int) -> np.ndarray:
        """Return the place in the corpus of each token of a sample; int64 [seq_length + 1]."""
        return self.starts([number])[0] + np.arange(self.seq_length + 1)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return tokens of the samples with these numbers; int64 [n, seq_length + 1].

        Sample g is place g % len(self) of epoch g // len(self). Raises CorruptData for an id
        outside the vocabulary, and for an index that does not add up.
        """
        self.dataset.check_next()
        starts = self.starts(numbers)
        out = np.empty((len(starts), self.seq_length + 1), np.int64)
        self.dataset.expect(starts, self.seq_length + 1)
        for row, start in zip(out, starts, strict=True):
            row[:] = self.dataset.tokens[start : start + self.seq_length + 1]
        if len(out) and (out.min() < 0 or out.max() >= self.vocab_size):
            self._refuse(out, starts, numbers)
        return out

    def _refuse(
        self, tokens: np.ndarray, starts: np.ndarray, numbers: Sequence[int] | np.ndarray
    ) -> None:
        row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
        raise self._outside(
            int(starts[row]) + int(column), f"{self.name} sample {int(numbers[row])}"
        )

    def _outside(self, place: int, where: str) -> CorruptData:
        data = self.dataset
        return CorruptData(
            f"{data.bin}: offset {place * data.dtype.itemsize}: token id {data.tokens[place]} in"
            f" document {data.document_at(place)} ({where}); the vocabulary has ids 0 to"
            f" {self.vocab_size - 1}"
        )

    def check_ids(self, limit: int) -> None:
        """Check the first `limit` tokens of the split.

        Raises CorruptData for an id outside the vocabulary.
        """
        if self.dataset.is_remote:
            limit = min(limit, REMOTE_CHECKED)
        end = self.first + min(limit, self.num_tokens)
        for start in range(self.first, end, SCANNED):
            if not self.dataset.is_remote:
                self.dataset.expect([start], min(SCANNED, end - start))
            tokens = self.dataset.tokens[start : min(start + SCANNED, end)]
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
                bad = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
                raise self._outside(start + bad, f"split {self.name}")

    def describe(self) -> dict[str, int]:
        """Return the numbers of documents, tokens, and samples of an epoch."""
        return {"documents": len(self.documents), "tokens": self.num_tokens, "samples": self._count}


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
            # the token that ends a document stays in its place
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
        # the three marks take the place of the piece's last tokens, so that its length stays
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
