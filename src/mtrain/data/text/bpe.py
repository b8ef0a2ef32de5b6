"""A byte-level BPE: trained on a corpus, then used to encode it in batches of bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtrain import units

EOD_TOKEN = "<|endoftext|>"
EOD = 0
TRAIN_BYTES = 64 * units.MIB
"""The BPE is trained on the first documents up to this size: a fair sample, as they are shuffled.
"""
BATCH_CHARS = 4 * units.MIB


def train(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` tokens; id 0 ends a document.

    A small corpus gives fewer tokens.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_until(texts, TRAIN_BYTES), trainer)
    return tokenizer


def read(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tokenizer.json`."""
    return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))


def _until(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit -= len(text)
        if limit <= 0:
            return


@dataclass(frozen=True)
class Encoded:
    """Documents end to end, each with its end-of-document token."""

    tokens: np.ndarray
    """int64 [tokens]"""
    lengths: np.ndarray
    """int64 [documents]"""


def encode(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], eod: int = EOD
) -> Iterator[Encoded]:
    """Encode documents in batches, each document with `eod` at its end.

    RAYON_NUM_THREADS sets the number of threads. In a document, `<|endoftext|>` is plain text and
    does not end it.
    """
    tokenizer.encode_special_tokens = True
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield _encode_batch(tokenizer, batch, eod)
            batch = []
            size = 0
    if batch:
        yield _encode_batch(tokenizer, batch, eod)


def _encode_batch(tokenizer: tokenizers.Tokenizer, texts: list[str], eod: int) -> Encoded:
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    lengths = np.array([len(i) + 1 for i in ids], np.int64)
    tokens = np.full(int(lengths.sum()), eod, np.int64)
    start = 0
    for document, length in zip(ids, lengths, strict=True):
        tokens[start : start + length - 1] = document
        start += length
    return Encoded(tokens, lengths)
