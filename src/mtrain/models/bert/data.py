"""The objective of BERT: masked language modelling and next sentence prediction."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import Collator, MicroBatch, Source
from mtrain.data.samples.permutation import mix64
from mtrain.models.bert.config import BertConfig

MASKED = 0.8
RANDOM = 0.1
"""Shares of the chosen tokens that become [MASK], and any token; others stay (section 3.1)."""
_KINDS = 5
_CHOICE, _FATE, _TOKEN, _NEXT, _OTHER = range(_KINDS)
"""Kinds of random numbers: the choice of tokens, the fate of a chosen one, its random token,
whether B follows A, and the document that B comes from otherwise.
"""


class Draws:
    """Random numbers that depend only on seed, split, sample number and position."""

    def __init__(self, seed: int, part: str) -> None:
        digest = hashlib.sha256(f"bert/{seed}/{part}".encode()).digest()
        self._keys = mix64(
            np.frombuffer(digest[:8], np.uint64) + np.arange(_KINDS, dtype=np.uint64)
        )

    def words(self, what: int, samples: np.ndarray, positions: int) -> np.ndarray:
        """Return uint64 [n, positions] for n sample numbers, independent for each `what`."""
        rows = mix64(samples.astype(np.uint64)[:, None] + self._keys[what])
        return mix64(rows + mix64(np.arange(positions, dtype=np.uint64) + np.uint64(1)))

    def uniform(self, what: int, samples: np.ndarray, positions: int) -> np.ndarray:
        """Return the same as float64 in [0, 1)."""
        # A double holds 53 bits.
        return (self.words(what, samples, positions) >> np.uint64(11)) * 2.0**-53


def collator(run: RunConfig, splits: Splits, part: str) -> Collator:
    """Return the micro-batches of `part` of the splits: see `masked`. Source: Devlin et al.

    Source: Devlin et al. 2018, sections 3.1 and A.1.
    """
    bert = BertConfig.of(run.model)
    source = getattr(splits, part)
    draws = Draws(run.trainer.seed, part)
    never = (*bert.special_ids, *(() if splits.masked_eod is None else (splits.masked_eod,)))

    def made(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        text = windows.numpy()
        if bert.next_sentence:
            tokens, types, apart = _pairs(text, numbers, bert, source, draws)
        else:
            tokens = _alone(text, bert)
            types = np.zeros(text[:, 1:].shape, np.int64)
            apart = None
        read, chosen = masked(tokens, numbers, bert, run.model.vocab_size, never, draws)
        batch = MicroBatch(
            tokens=torch.from_numpy(read),
            labels=torch.from_numpy(tokens),
            loss_mask=torch.from_numpy(chosen.astype(np.float32)),
            position_ids=torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous(),
        )
        more = {"token_types": torch.from_numpy(types)}
        if apart is not None:
            more["next_sentence"] = torch.from_numpy(apart.astype(np.int64))
        batch.update(more)  # type: ignore[typeddict-item]
        return batch

    return made


def masked(
    tokens: np.ndarray,
    numbers: np.ndarray,
    bert: BertConfig,
    vocab_size: int,
    never: tuple[int, ...],
    draws: Draws,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [n, s] of the samples `numbers` as they are read, and which of them are
    chosen and predicted.

    Of each sample `masked_share` of its tokens is chosen, rounded, at least one; as many as there
    are where fewer are not in `never`. A chosen token is replaced by [MASK] in 80% of cases, by any
    of `vocab_size` tokens in 10%.
    """
    # A sample without a prediction would have no loss.
    count = max(1, round(bert.masked_share * tokens.shape[1]))
    order = draws.uniform(_CHOICE, numbers, tokens.shape[1])
    # A random order with special tokens last: the first `count` of it are chosen.
    free = ~np.isin(tokens, never)
    ranks = np.where(free, order, 2.0).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    chosen = free & (ranks < count)
    fate = draws.uniform(_FATE, numbers, tokens.shape[1])
    anything = (draws.words(_TOKEN, numbers, tokens.shape[1]) % np.uint64(vocab_size)).astype(
        np.int64
    )
    read = np.where(chosen & (fate < MASKED), bert.mask_token_id, tokens)
    return np.where(chosen & (fate >= MASKED) & (fate < MASKED + RANDOM), anything, read), chosen


def _alone(text: np.ndarray, bert: BertConfig) -> np.ndarray:
    """Return windows [n, s + 1] as one sentence with its special tokens, [n, s]."""
    length = text.shape[1] - 1
    return _joined(text, bert, [slice(0, length - bert.added())])


def _pairs(
    text: np.ndarray, numbers: np.ndarray, bert: BertConfig, source: Source, draws: Draws
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two sentences of each window [n, s + 1], [n, s], the kinds of their tokens, and
    whether they are apart [n].

    Sentence A is the first half of the window. Sentence B is the second half of it, or of another
    sample's.
    """
    length = text.shape[1] - 1
    room = length - bert.added()
    first = slice(0, room - room // 2)
    second = slice(room - room // 2, room)
    apart = draws.uniform(_NEXT, numbers, 1)[:, 0] < 0.5
    if len(source) > 1 and apart.any():
        # At least one sample further and less than a round, so never the same one.
        many = np.uint64(len(source) - 1)
        steps = (draws.words(_OTHER, numbers[apart], 1)[:, 0] % many).astype(np.int64) + 1
        # The windows are the loader's, and may be views of the data.
        text = text.copy()
        # in one epoch, two numbers are two samples
        epochs, places = np.divmod(numbers[apart], len(source))
        text[apart, second] = source.batch(epochs * len(source) + (places + steps) % len(source))[
            :, second
        ]
    else:
        apart = np.zeros_like(apart)
    kinds = np.zeros((len(text), length), np.int64)
    ends = (
        (bert.cls_token_id is not None)
        + (first.stop - first.start)
        + (bert.sep_token_id is not None)
    )
    kinds[:, ends:] = 1
    return _joined(text, bert, [first, second]), kinds, apart


def _joined(text: np.ndarray, bert: BertConfig, sentences: list[slice]) -> np.ndarray:
    def of(token: int | None) -> list[np.ndarray]:
        return [] if token is None else [np.full((len(text), 1), token, np.int64)]

    parts = of(bert.cls_token_id)
    for sentence in sentences:
        parts += [text[:, sentence], *of(bert.sep_token_id)]
    return np.concatenate(parts, axis=1)
