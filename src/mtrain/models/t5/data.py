"""The objective of an encoder-decoder: span corruption (arXiv:1910.10683, 3.1.4).

Spans of a mean length hide the share `model.t5.noise_density` of a sample's tokens. The
encoder reads the sample with a sentinel in place of each span; the decoder predicts each sentinel
and the tokens of its span. Both end with `end_id`. The number of tokens and spans that are left out
does not depend on the sample, so both lengths are fixed; which ones depends only on the seed, the
split and the number of the sample.
"""

from __future__ import annotations

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import Collator, MicroBatch
from mtrain.data.samples.permutation import keys, mix64
from mtrain.models.t5.config import T5Config, lengths, spans

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""The step of splitmix64, which sets the words of one sample apart."""


class SpanBatch(MicroBatch):
    """A micro-batch with the decoder's input as `tokens` [b, s]."""

    encoder_tokens: torch.Tensor
    """int64 [b, t]: what the encoder reads."""
    encoder_mask: torch.Tensor
    """bool [b, t]: False where that is padding."""


def collator(run: RunConfig, splits: Splits, part: str) -> Collator:
    """Return the micro-batches of `part` of the splits."""
    t = T5Config.of(run.model)
    first = run.model.vocab_size - 1 if t.first_sentinel is None else t.first_sentinel
    return Spans(t, run.data.length, first, run.trainer.seed, part)


class Spans:
    """Makes micro-batches of samples of `tokens` tokens; sentinels go down from `first`."""

    def __init__(self, t: T5Config, tokens: int, first: int, seed: int, part: str) -> None:
        self.noise, self.spans = spans(t, tokens)
        self.tokens = tokens
        self.start_id = t.start_id
        self.end_id = t.end_id
        needed = lengths(t, tokens)
        self.read = t.encoder_length or needed[0]
        self.written = t.decoder_length or needed[1]
        self.sentinels = first - np.arange(self.spans)
        self._key = keys(seed, 0, f"spans {part}", 1)

    def __call__(self, windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        """Return the micro-batch of windows int64 [n, tokens + 1] and their numbers."""
        pairs = [
            self.split(w, self.noisy(n))
            for w, n in zip(windows.numpy()[:, :-1], numbers, strict=True)
        ]
        read = torch.from_numpy(np.stack([self._filled(source, self.read) for source, _ in pairs]))
        labels = torch.from_numpy(
            np.stack([self._filled(target, self.written) for _, target in pairs])
        )
        # All samples have as many spans, so the first row's lengths are those of all.
        there = torch.arange(self.written) < len(pairs[0][1])
        seen = torch.arange(self.read) < len(pairs[0][0])
        return SpanBatch(
            tokens=torch.cat([torch.full_like(labels[:, :1], self.start_id), labels[:, :-1]], 1),
            labels=labels,
            loss_mask=there.float().expand_as(labels).contiguous(),
            position_ids=torch.arange(self.written).expand_as(labels).contiguous(),
            encoder_tokens=read,
            encoder_mask=seen.expand_as(read).contiguous(),
        )

    def noisy(self, number: int) -> np.ndarray:
        """Return which tokens of a sample are left out, bool [tokens], as a function of the
        sample's number.

        Tokens that stay and tokens that are left out take turns, both in as many parts as there are
        spans, and every way to cut them is as likely as any other.
        """
        base = mix64(np.uint64(number) ^ self._key)
        words = mix64(base + np.arange(self.tokens, dtype=np.uint64) * _STEP)
        left = words[: self.noise - 1]
        kept = words[self.noise : self.tokens - 1]
        lengths = np.stack([_parts(kept, self.spans), _parts(left, self.spans)], 1).ravel()
        return np.repeat(np.tile([False, True], self.spans), lengths)

    def split(self, window: np.ndarray, noisy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the encoder's input and decoder's labels of a sample, int64, unpadded."""
        return self._with_sentinels(window, noisy), self._with_sentinels(window, ~noisy)

    def _with_sentinels(self, window: np.ndarray, gone: np.ndarray) -> np.ndarray:
        """Return the sample with a sentinel in place of each run of `gone`, and an end."""
        # Each run of tokens that are left out begins where the one before it is not.
        begins = gone & ~np.concatenate([[False], gone[:-1]])
        out = window.copy()
        out[begins] = self.sentinels
        return np.append(out[begins | ~gone], self.end_id)

    def _filled(self, sequence: np.ndarray, length: int) -> np.ndarray:
        return np.pad(sequence, (0, length - len(sequence)), constant_values=self.start_id)


def _parts(words: np.ndarray, count: int) -> np.ndarray:
    """Return `count` random lengths of at least one that add up; int64 [count]."""
    cuts = np.sort(np.argsort(words, kind="stable")[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [len(words) + 1]]))
