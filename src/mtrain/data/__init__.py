"""Data: text becomes tokens once (`prepare`), tokens become samples by arithmetic (`open_splits`).

The launcher calls `prepare` before it starts ranks; each rank calls `open_splits` and reads for
itself. torch is imported by `mtrain.data.batch` and `mtrain.data.chat_batch` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.config.resolve.defaults import CHATS
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data import chat_samples, chats, image_text, mock, opening, tokenize
from mtrain.data.blend import Blend
from mtrain.data.chat_samples import ChatSamples, PairSamples
from mtrain.data.image_text import ImageTextSamples
from mtrain.data.indexed import IndexedDataset
from mtrain.data.mock import DOCUMENT_ENDS, MockSamples
from mtrain.data.samples import SHARES, Samples, entropy_nats
from mtrain.data.tokenize import Corpus, verify
from mtrain.data.whole_documents import BlendOfDocuments, WholeDocuments, remarks_of
from mtrain.errors import ConfigError, CorruptData, Problem, say

__all__ = [
    "BlendOfDocuments",
    "ChatSamples",
    "Corpus",
    "ImageTextSamples",
    "PairSamples",
    "Samples",
    "Splits",
    "WholeDocuments",
    "open_splits",
    "prepare",
    "prepare_for_model",
    "same_data",
    "validation_of",
    "verify",
]

ORDERED_BY = ("epochs", "together")
"""What Megatron's order follows from, beside the corpus: epochs, and samples that are shuffled
together.
"""
ENTROPY_TOKENS = 5_000_000
CHECKED_TOKENS = 1 << 26
"""Tokens of a split that are looked at before ranks start: a tenth of a second."""


Part = Samples | Blend | MockSamples | ImageTextSamples | ChatSamples | PairSamples
"""The samples of a split."""


@dataclass
class Splits:
    """Train, validation and test samples; None for a split that is not needed and has no sample."""

    corpus: Corpus
    train: Part
    validation: Part | None
    test: Part | None
    eod: int | None
    """Id of the end-of-document token, where known."""
    masked_eod: int | None
    """The same if the configuration wants no loss after it: what `GlobalBatches` takes."""
    document_ends: tuple[int, ...]
    """Tokens after which another document begins; none known: empty."""
    dataset: IndexedDataset | None = field(repr=False)
    """The one corpus; None for synthetic tokens and a blend."""

    @property
    def tokenizer(self) -> Path | None:
        """Return the `tokenizer.json`; None: no text can be generated."""
        return self.corpus.tokenizer

    @cached_property
    def unigram_entropy_nats(self) -> float | None:
        """Return entropy of the token distribution: of a text corpus all of it, of `.bin/.idx` the
        validation split (its first 5 million tokens); None where unknown.
        """
        if isinstance(self.train, MockSamples):
            return self.train.unigram_entropy_nats()
        known = self.corpus.meta.get("unigram_entropy_nats")
        if known is not None or not isinstance(self.validation, Samples) or self.dataset is None:
            return known
        start = self.validation.first
        ids = self.dataset.tokens[start : start + min(self.validation.num_tokens, ENTROPY_TOKENS)]
        if int(ids.min()) < 0 or int(ids.max()) >= self.validation.vocab_size:
            raise CorruptData(
                f"{self.dataset.bin}: the validation split has token ids {ids.min()} to"
                f" {ids.max()}; the vocabulary has 0 to {self.validation.vocab_size - 1}"
            )
        return entropy_nats(np.bincount(ids))

    def check_ids(self) -> None:
        """Look at the first tokens of what is trained and evaluated on, for the launcher: later
        every batch is.

        Raises CorruptData for an id outside the vocabulary, with its document.
        """
        for part in (self.train, self.validation):
            if isinstance(part, Samples):
                part.check_ids(CHECKED_TOKENS)

    def remarks(self) -> list[str]:
        """What is worth to be said before they are trained on: of chats, what is cut, left out or
        no JSON; of whole documents, how full samples are, and what is cut or left out.
        """
        if isinstance(self.train, WholeDocuments | BlendOfDocuments):
            return remarks_of(self.train)
        if self.corpus.meta["kind"] not in CHATS:
            return []
        meta = self.corpus.meta
        train = self.train.describe()
        said = (
            f"data: {meta['documents']} chats of {meta['tokens']} tokens, {meta['learned']} of"
            " which are learned; "
        )
        said += f"{train['samples']} samples in an epoch"
        found = [said]
        if train["cut"] or train["left_out"]:
            cut = (
                f"{train['cut']} chats of train are cut at data.seq_length {self.train.seq_length}"
            )
            found.append(
                f"{cut}; {train['left_out']} of them left out, with nothing to learn before it"
            )
        if meta.get("parsed_arguments"):
            what = (
                "have arguments of tools as JSON text, and are written with the objects that it"
                " says"
            )
            found.append(f"data: {meta['parsed_arguments']} chats {what}")
        if meta["bad_lines"] and self.corpus.prefix is not None:
            where = self.corpus.prefix.parent / chats.REJECTS
            found.append(
                f"{meta['bad_lines']} lines of {meta['source']} are no JSON and are left out:"
                f" {where}"
            )
        return found

    def describe(self) -> dict[str, Any]:
        """Return counts of the corpus and of each split, ready for JSON."""
        keys = [
            "kind",
            "source",
            "documents",
            "skipped",
            "bad_lines",
            "tokens",
            "learned",
            "text_bytes",
        ]
        keys += ["vocab_size", "fingerprint"]
        out: dict[str, Any] = {k: self.corpus.meta[k] for k in keys if k in self.corpus.meta}
        out["tokenizer_sha256"] = self.corpus.tokenizer_sha256
        out |= {"eod": self.eod, "unigram_entropy_nats": self.unigram_entropy_nats}
        for name in SHARES:
            part = getattr(self, name)
            out[name] = part.describe() if part is not None else None
        return out


def _say(note: str) -> None:
    say(note, error=True)


def prepare(
    data: DataConfig, note: Callable[[str], None] = _say, tokenizer: Path | None = None
) -> Corpus:
    """Make the corpus of a configuration ready: see `prepare` of `tokenize`, of `image_text` and of
    `chats`.
    """
    data = data.without_excluded()
    of_kind = {"image_text": image_text.prepare, **dict.fromkeys(CHATS, chats.prepare)}
    return of_kind.get(data.kind or "", tokenize.prepare)(data, note, tokenizer)


def prepare_for_model(
    data: DataConfig,
    model: Path | None,
    note: Callable[[str], None] = _say,
    *,
    accept_changes: bool = False,
) -> Corpus:
    """`prepare` for a model that has the `tokenizer.json` `model`: what has no tokens yet is
    tokenized with it.

    None: the model has none. Raises ConfigError where another tokenizer is named, or made the
    tokens of a corpus, unless changes are accepted.
    """
    if model is None or data.kind == "mock":
        return prepare(data, note)
    corpus = prepare(data, note, None if data.tokenizer is not None else model)
    theirs = corpus.tokenizer_sha256
    if theirs is not None and not accept_changes and theirs != (ours := sha256_of(model)):
        if data.tokenizer is not None:
            what = data.tokenizer
        else:
            what = corpus.meta.get("source", str(corpus.prefix))
        key = "data.path" if data.tokenizer is None else "data.tokenizer"
        rule = (
            f"its tokenizer ({theirs[:12]}) is another one than the model has, {model}"
            f" ({ours[:12]})"
        )
        if data.tokenizer is not None:
            fix = "data.tokenizer=null"
        else:
            fix = f"text that was tokenized with {model}"
        raise ConfigError([Problem("MT345", key, what, rule, fix)])
    return corpus


def same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than a checkpoint was trained on, or with the same in another
    order.

    `saved` is what `Splits.describe` gave then, `now` what it gives. Raises ConfigError if the
    corpus, or its tokenizer, is another.
    """
    for key, what in (("fingerprint", "corpus"), ("tokenizer_sha256", "tokenizer")):
        if saved.get(key) != now.get(key):
            rule = (
                f"the {what} is not the one that the checkpoint was trained on ({key}"
                f" {str(now.get(key))[:12]}, then {str(saved.get(key))[:12]})"
            )
            fix = "checkpoint.accept_changes=true to go on with it, or the files as they were"
            raise ConfigError([Problem("MT609", "data.path", now.get("source"), rule, fix)])
    dealt = [(part.get("train") or {}).get("dealt") for part in (saved, now)]
    if dealt[0] != dealt[1]:
        rule = (
            "shares below one in a million were dealt out otherwise by the version that wrote the"
            " checkpoint"
        )
        fix = "checkpoint.accept_changes=true to go on in the new order"
        raise ConfigError([Problem("MT609", "data.blend", now.get("source"), rule, fix)])
    before, after = (
        [(part.get("train") or {}).get(key) for key in ORDERED_BY] for part in (saved, now)
    )
    if before != after:
        rule = (
            f"Megatron's order follows from the steps of a run, and it is another one ({after},"
            f" then {before})"
        )
        fix = (
            "trainer.train_iters and trainer.global_batch_size as they were, or"
            " checkpoint.accept_changes=true"
        )
        raise ConfigError([Problem("MT609", "trainer.train_iters", None, rule, fix)])


def _token_problems(data: DataConfig, vocab_size: int, corpus: Corpus) -> list[Problem]:
    """Return a problem for each token id that the model or the data keys cannot use."""
    eod = corpus.meta.get("eod")
    problems = list[Problem]()
    held = corpus.meta.get("vocab_size")
    if held is not None and held > vocab_size:
        rule = f"the tokenizer of the corpus has {held} tokens, the model {vocab_size}"
        problems.append(
            Problem("MT607", "model.vocab_size", vocab_size, rule, f"model.vocab_size={held}")
        )
    if (largest := corpus.meta.get("largest_id", -1)) >= vocab_size:
        rule = (
            f"the manifest says token ids to {largest}, and the model has ids 0 to {vocab_size - 1}"
        )
        problems.append(
            Problem(
                "MT612", "model.vocab_size", vocab_size, rule, f"model.vocab_size={largest + 1}"
            )
        )
    if data.eod_mask_loss and eod is None:
        rule = "no end-of-document token is known"
        fix = "data.eod_mask_loss=false, or data.tokenizer=PATH of a tokenizer.json that has one"
        problems.append(Problem("MT608", "data.eod_mask_loss", True, rule, fix))
    for key, value, off in (
        ("packed", data.needs_document_ends, "false"),
        ("fim.rate", data.fim.rate, "0"),
    ):
        if value and eod is None:
            rule = "documents are told apart by their end-of-document token, and none is known"
            fix = f"data.{key}={off}, or data.tokenizer=PATH of a tokenizer.json that has one"
            problems.append(Problem("MT608", f"data.{key}", value, rule, fix))
    if data.fim.rate and eod in (data.fim.ids or ()):
        rule = f"id {eod} ends documents, and marks a part of them too"
        problems.append(
            Problem("MT355", "data.fim.ids", list(data.fim.ids or ()), rule, "three other ids")
        )
    return problems


def open_splits(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    corpus: Corpus,
    need: Sequence[str] = ("train", "validation"),
    asked: Sequence[int] | None = None,
) -> Splits:
    """Open a prepared corpus as samples; a split that is not in `need` may be empty or too small,
    and is then None. `asked` is how many samples of each split a run takes; None: it is not known.

    Raises ConfigError for a vocabulary or a split that does not fit, CorruptData for files that do
    not add up.
    """
    data = data.without_excluded()
    if data.kind == "image_text":
        pairs = image_text.opened(data, vocab_size, seed, corpus, need)
        return Splits(
            corpus,
            **pairs,  # type: ignore[arg-type]
            eod=corpus.meta["eod"],
            masked_eod=None,
            document_ends=(),
            dataset=None,
        )
    if data.kind in CHATS:
        said = chat_samples.opened(data, vocab_size, seed, corpus, need)
        return Splits(
            corpus,
            **said,  # type: ignore[arg-type]
            eod=corpus.meta["eod"],
            masked_eod=None,
            document_ends=(),
            dataset=None,
        )
    if corpus.prefix is None:
        if data.whole_documents:
            made = mock.whole_documents(data, seed, vocab_size)
            last = (mock.last_of(vocab_size),)
            return Splits(
                corpus, **made, eod=None, masked_eod=None, document_ends=last, dataset=None
            )
        mocks = [MockSamples(data.length, seed, vocab_size, name) for name in SHARES]
        return Splits(
            corpus,
            *mocks,  # type: ignore[misc,arg-type]
            eod=None,
            masked_eod=None,
            document_ends=DOCUMENT_ENDS,
            dataset=None,
        )
    eod = corpus.meta.get("eod")
    problems = _token_problems(data, vocab_size, corpus)
    parts = opening.opened(data, vocab_size, seed, corpus, need, asked, problems)
    train = parts["train"]
    if problems or train is None:
        raise ConfigError(problems)
    masked = eod if data.eod_mask_loss else None
    ends = () if eod is None else (eod,)
    alone = train.dataset if isinstance(train, Samples) else None
    return Splits(corpus, train, parts["validation"], parts["test"], eod, masked, ends, alone)


def validation_of(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    tokenizer: Path | None,
    asked: Sequence[int] | None = None,
) -> Splits:
    """Return the splits of a configuration's data, for a model whose `tokenizer.json` is given; a
    validation split is there.

    Text is tokenized with that file. Raises ConfigError where there is no validation split, or the
    tokens of a `.bin/.idx` are those of another tokenizer.
    """
    splits = open_splits(
        data, vocab_size, seed, prepare(data, tokenizer=tokenizer), ("validation",), asked
    )
    theirs = splits.corpus.tokenizer_sha256
    if theirs is not None and tokenizer is not None:
        ours = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        if ours != theirs:
            rule = (
                f"its tokens are those of another tokenizer ({theirs[:12]}) than the model's"
                f" ({ours[:12]})"
            )
            fix = f"data=indexed data.path=PREFIX of text that was tokenized with {tokenizer}"
            raise ConfigError([Problem("MT609", "data.path", data.path, rule, fix)])
    return splits
