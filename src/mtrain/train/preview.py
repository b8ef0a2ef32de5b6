"""Samples of a configuration, token by token, as a model learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data import BlendOfDocuments, ChatSamples, PairSamples, Splits, WholeDocuments
from mtrain.data.batch import GlobalBatches, MicroBatch, collate
from mtrain.data.chats.samples import NOTHING, Sample
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.models.registry import family_of, imported

WITH_BOUNDS = (ChatSamples, WholeDocuments, BlendOfDocuments)
"""Samples that know where their documents begin, and which tokens pad them."""


@dataclass(frozen=True)
class Token:
    """A token of a sample."""

    id: int
    text: str
    position: int
    weight: float
    """Weight of its loss, given the tokens before it; 0: it is not learned."""
    padding: bool = False
    ends: bool = False
    """True if it ends a document that the next document can see."""
    instead: str = ""
    """The token predicted in its place, if that is another one: a masked token, for example."""


@dataclass(frozen=True)
class Shown:
    """A sample, or one chat of a pair."""

    name: str
    place: str
    """Source of the sample; empty if it is not known."""
    documents: tuple[tuple[Token, ...], ...]
    """Tokens of one attention mask, in order."""
    read: str = ""
    """The text that an encoder reads."""

    @cached_property
    def tokens(self) -> list[Token]:
        """Return the tokens of all documents."""
        return [token for document in self.documents for token in document]

    @property
    def counts(self) -> dict[str, int]:
        """Count tokens, those with a loss, padding, and documents that are not only padding."""
        return {
            "tokens": sum(not token.padding for token in self.tokens),
            "loss": sum(token.weight > 0 for token in self.tokens),
            "padding": sum(token.padding for token in self.tokens),
            "documents": sum(_parts(document) for document in self.documents),
        }

    @property
    def heading(self) -> str:
        """Return the counts in words."""
        counts = self.counts
        many = "document" if counts["documents"] == 1 else "documents"
        text = (
            f"{counts['tokens']} tokens, {counts['loss']} carry loss, {counts['documents']} {many}"
        )
        return text + (f", {counts['padding']} of padding" if counts["padding"] else "")


def _parts(document: tuple[Token, ...]) -> int:
    if all(token.padding for token in document):
        return 0
    return 1 + sum(token.ends for token in document[:-1])


def previewed(run: RunConfig, splits: Splits, part: str, numbers: Sequence[int]) -> list[Shown]:
    """Return samples of a split by their numbers in the order of training.

    Raises:
        CorruptData: a sample cannot be read.
    """
    source = getattr(splits, part)
    texts = _Texts(splits)
    if isinstance(source, PairSamples):
        return [shown for number in numbers for shown in _pair(source, number, texts)]
    collator = imported(family_of(run.model).collator)(run, splits, part)
    # The weights shown are those that the loss of this split has.
    average = run.trainer.loss_average if part == "train" else "token"
    batches = GlobalBatches(source, 1, 1, 0, 1, collator, None, average)
    return [
        _shown(f"sample {i} of {part}", source, i, batches.microbatches(i)[0], texts)
        for i in numbers
    ]


class _Texts:
    """The texts of token ids, or their numbers where there is no tokenizer."""

    def __init__(self, splits: Splits) -> None:
        self._tokenizer = Tokenizer(splits.tokenizer) if splits.tokenizer is not None else None
        self._known: dict[int, str] = {}
        self.ends = frozenset(splits.document_ends)

    def __call__(self, number: int) -> str:
        if self._tokenizer is None:
            return str(number)
        if number not in self._known:
            inside = 0 <= number < self._tokenizer.vocab_size
            self._known[number] = self._tokenizer.text_of(number) if inside else f"<{number}>"
        return self._known[number]


def _pair(source: PairSamples, number: int, texts: _Texts) -> list[Shown]:
    return [
        _of(
            f"sample {number} of {source.name}, {which}",
            source.place(number),
            collate([one], packed=False),
            one,
            texts,
        )
        for which, one in zip(("chosen", "rejected"), source.pair(number), strict=True)
    ]


def _shown(name: str, source: Any, number: int, batch: MicroBatch, texts: _Texts) -> Shown:
    sample = source.sample(number) if isinstance(source, WITH_BOUNDS) else None
    return _of(name, source.place(number) if hasattr(source, "place") else "", batch, sample, texts)


def _of(name: str, place: str, batch: MicroBatch, sample: Sample | None, texts: _Texts) -> Shown:
    ids = batch["tokens"].flatten().tolist()
    labels = batch["labels"].flatten().tolist()
    weights = batch["loss_mask"].flatten().tolist()
    positions = batch["position_ids"].flatten().tolist()
    # Only samples with bounds know padding from an end-of-text token.
    padding = [False] * len(ids) if sample is None else (sample.tokens[:-1] == NOTHING).tolist()
    cu_seqlens = batch.get("cu_seqlens")
    bounds = [0, len(ids)] if cu_seqlens is None else cu_seqlens.tolist()
    # Masked language models predict tokens in place, others the next one.
    following = _is_next(ids, labels, weights)
    ends = texts.ends if cu_seqlens is None else frozenset[int]()
    documents = []
    for start, stop in pairwise(bounds):
        row = []
        for i in range(start, stop):
            if following:
                weight = weights[i - 1] if i > start else 0.0
            else:
                weight = weights[i]
            instead = texts(labels[i]) if not following and weight else ""
            row.append(
                Token(
                    ids[i], texts(ids[i]), positions[i], weight, padding[i], ids[i] in ends, instead
                )
            )
        if following and weights[stop - 1]:  # the token predicted after the last one that is read
            last = positions[stop - 1] + 1
            row.append(Token(labels[stop - 1], texts(labels[stop - 1]), last, weights[stop - 1]))
        documents.append(tuple(row))
    return Shown(name, place, tuple(documents), _encoder(batch, texts))


def _is_next(ids: Sequence[int], labels: Sequence[int], weights: Sequence[float]) -> bool:
    """Return whether the tokens that count predict the token after them."""
    read = [i for i in range(len(ids) - 1) if weights[i]]
    return all(labels[i] == ids[i + 1] for i in read)


def _encoder(batch: Any, texts: _Texts) -> str:
    tokens = batch.get("encoder_tokens")
    mask = batch.get("encoder_mask")
    if not isinstance(tokens, torch.Tensor):
        return ""
    kept = tokens if mask is None else tokens[mask.bool()]
    return "".join(texts(number) for number in np.asarray(kept).ravel().tolist())
