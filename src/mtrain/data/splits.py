"""The corpus of a configuration, prepared before ranks start, and its splits as samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.defaults import CHATS
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data import image_text
from mtrain.data.chats import prepare as chats
from mtrain.data.chats.prepare import REJECTS
from mtrain.data.chats.samples import ChatSamples, PairSamples, PromptSamples, open_chats
from mtrain.data.image_text import ImageTextSamples, open_image_text
from mtrain.data.samples import megatron_order, mock
from mtrain.data.samples.blend import Blend, Plan, by_sizes, exhausted_problem, unweighted_problem
from mtrain.data.samples.megatron_cache import MegatronCache
from mtrain.data.samples.mock import DOCUMENT_ENDS, MockSamples
from mtrain.data.samples.token_stream import SHARES, Samples, entropy_nats, split_documents
from mtrain.data.samples.whole_documents import (
    BlendOfDocuments,
    Fit,
    WholeDocuments,
    packing_remarks,
)
from mtrain.data.store.corpus import Corpus
from mtrain.data.store.indexed import IndexedDataset
from mtrain.data.text import tokenize as text
from mtrain.data.text.tokenize import say_to_stderr
from mtrain.errors import ConfigError, CorruptData, Problem


def prepare(
    data: DataConfig, note: Callable[[str], None] = say_to_stderr, tokenizer: Path | None = None
) -> Corpus:
    """Make the corpus of a configuration ready.

    See `prepare` of `text.tokenize`, `chats.prepare` and `image_text` for their work and errors.
    """
    data = data.without_excluded()
    if data.kind == "image_text":
        return image_text.prepare(data, note, tokenizer)
    if data.kind in CHATS:
        return chats.prepare(data, note, tokenizer)
    return text.prepare(data, note, tokenizer)


def prepare_for_model(
    data: DataConfig,
    model: Path | None,
    note: Callable[[str], None] = say_to_stderr,
    *,
    accept_changes: bool = False,
) -> Corpus:
    """Make a corpus ready for a model whose `tokenizer.json` is `model`, if it has one.

    Text is tokenized with the model's tokenizer. Raises ConfigError if the configuration names
    another tokenizer, or if another one made the tokens of a corpus, unless `accept_changes`.
    """
    if model is None or data.kind == "mock":
        return prepare(data, note)
    # a tokenizer that the user names is compared with the model's, and not replaced
    corpus = prepare(data, note, None if data.tokenizer is not None else model)
    made_by = corpus.tokenizer_sha256
    if made_by is None or accept_changes:
        return corpus
    own = sha256_of(model)
    if made_by == own:
        return corpus
    if data.tokenizer is not None:
        key = "data.tokenizer"
        value = data.tokenizer
        fix = "data.tokenizer=null"
    else:
        key = "data.path"
        value = corpus.meta.get("source", str(corpus.prefix))
        fix = f"text that was tokenized with {model}"
    rule = (
        f"cannot be used because its tokenizer ({made_by[:12]}) is not the one of the model,"
        f" {model} ({own[:12]})"
    )
    raise ConfigError.of("MT345", key, value, rule, fix)


# What Megatron's order depends on besides the corpus: the number of epochs, and how many samples
# are shuffled together.
ORDERED_BY = ("epochs", "together")
ENTROPY_TOKENS = 5_000_000
# Tokens of a split that the launcher checks before ranks start, in a tenth of a second
CHECKED_TOKENS = 1 << 26
# Facts of a corpus that `Splits.describe` copies
DESCRIBED = (
    "kind",
    "source",
    "documents",
    "skipped",
    "bad_lines",
    "tokens",
    "learned",
    "text_bytes",
    "vocab_size",
    "fingerprint",
)

TextSamples = Samples | Blend
RecordSamples = ImageTextSamples | ChatSamples | PairSamples | PromptSamples
SplitSamples = TextSamples | MockSamples | RecordSamples


@dataclass
class Splits:
    """Train, validation and test samples; None for an unneeded split without samples."""

    corpus: Corpus
    train: SplitSamples
    validation: SplitSamples | None
    test: SplitSamples | None
    eod: int | None
    """Id of the end-of-document token, if known."""
    masked_eod: int | None
    """The same id if `data.eod_mask_loss` masks the loss after it, else None."""
    document_ends: tuple[int, ...]
    """Tokens that end a document; empty if none is known."""
    dataset: IndexedDataset | None = field(repr=False)
    """The one corpus; None for synthetic tokens and for a blend."""

    @property
    def tokenizer(self) -> Path | None:
        """Return the `tokenizer.json`; without one (None) no text can be generated."""
        return self.corpus.tokenizer

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokenizer's special tokens; without one, those that end documents.

        Raises:
            CorruptData: the tokenizer cannot be read.
        """
        if self.tokenizer is None:
            return self.document_ends
        from mtrain.data.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(self.tokenizer)
        ids = map(tokenizer.id_of, tokenizer.special_texts)
        return tuple(number for number in ids if number is not None)

    @cached_property
    def unigram_entropy_nats(self) -> float | None:
        """Return the entropy of the token distribution, or None if it is unknown.

        It covers all of a text corpus, and the first 5 million validation tokens of a `.bin/.idx`.
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
        """Check the first tokens of the train and validation splits before ranks start.

        Ranks check every batch later. Raises CorruptData for an id outside the vocabulary, with its
        document.
        """
        for samples in (self.train, self.validation):
            if isinstance(samples, Samples):
                samples.check_ids(CHECKED_TOKENS)

    def remarks(self) -> list[str]:
        """Return remarks for the user: cut and left-out data, and how full packed samples are."""
        if isinstance(self.train, WholeDocuments | BlendOfDocuments):
            return packing_remarks(self.train)
        meta = self.corpus.meta
        if meta["kind"] not in CHATS:
            return []
        train = self.train.describe()
        remarks = [
            f"data: {meta['documents']} chats of {meta['tokens']} tokens, {meta['learned']} of"
            f" which are learned; {train['samples']} samples in an epoch"
        ]
        if isinstance(self.train, ChatSamples) and self.train.chats.group == 2:
            if train["left_out"]:
                remarks.append(
                    f"{train['left_out']} pairs of train are left out: their two answers do not fit"
                    f" into a packed sample of {self.train.seq_length} tokens (data.seq_length)"
                )
        elif train["cut"] or train["left_out"]:
            remarks.append(
                f"{train['cut']} chats of train are cut at data.seq_length"
                f" {self.train.seq_length}; {train['left_out']} of them are left out, with nothing"
                " to learn before the cut"
            )
        if meta.get("preferences") == "scores":
            remarks.append(
                f"data: {meta['documents'] // 2} pairs of {meta['lines']} lines with scored"
                f" answers; equal scores leave {meta['lines_unused']} lines without a pair"
            )
        if meta.get("parsed_arguments"):
            remarks.append(
                f"data: {meta['parsed_arguments']} chats have arguments of tools as JSON text,"
                " which their template gets as objects"
            )
        if meta["bad_lines"] and self.corpus.prefix is not None:
            remarks.append(
                f"{meta['bad_lines']} lines of {meta['source']} are not JSON and are left out:"
                f" {self.corpus.prefix.parent / REJECTS}"
            )
        return remarks

    def identity(self) -> dict[str, Any]:
        """Return what `data_problems` compares of the training samples."""
        known = {key: self.corpus.meta.get(key) for key in ("fingerprint", "source")}
        train = self.train.describe()
        return {**known, "tokenizer_sha256": self.corpus.tokenizer_sha256, "train": train}

    def describe(self) -> dict[str, Any]:
        """Return counts of the corpus and of each split, ready for JSON."""
        meta = self.corpus.meta
        out: dict[str, Any] = {key: meta[key] for key in DESCRIBED if key in meta}
        out["tokenizer_sha256"] = self.corpus.tokenizer_sha256
        out |= {"eod": self.eod, "unigram_entropy_nats": self.unigram_entropy_nats}
        for name in SHARES:
            samples = getattr(self, name)
            out[name] = samples.describe() if samples is not None else None
        return out


def same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume with other data than a checkpoint was trained on, or in another order.

    See `data_problems`. Raises ConfigError with all of them.
    """
    problems = data_problems(saved, now)
    if problems:
        raise ConfigError(problems)


def data_problems(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Return a problem if the corpus, its tokenizer or its order differs from a checkpoint's.

    `saved` and `now` are results of `Splits.describe` or `Splits.identity`, then and now.
    """
    problems = []
    for key, what in (("fingerprint", "corpus"), ("tokenizer_sha256", "tokenizer")):
        if saved.get(key) != now.get(key):
            rule = (
                f"the {what} is not the one that the checkpoint was trained on ({key}"
                f" {str(now.get(key))[:12]}, then {str(saved.get(key))[:12]})"
            )
            fix = "checkpoint.accept_changes=true to continue with it, or the files as they were"
            problems.append(Problem("MT609", "data.path", now.get("source"), rule, fix))
    before = saved.get("train") or {}
    after = now.get("train") or {}
    # `Blend.describe` has this key since `Halves` orders small shares
    if before.get("dealt") != after.get("dealt"):
        rule = (
            "cannot be continued because the version that wrote the checkpoint ordered shares below"
            " one in a million differently"
        )
        fix = "checkpoint.accept_changes=true to continue in the new order"
        problems.append(Problem("MT609", "data.blend", now.get("source"), rule, fix))
    order_before = [before.get(key) for key in ORDERED_BY]
    order_after = [after.get(key) for key in ORDERED_BY]
    if order_before != order_after:
        rule = (
            f"Megatron's order follows from the steps of a run, and they changed ({order_after},"
            f" then {order_before})"
        )
        fix = (
            "trainer.train_iters and trainer.global_batch_size as they were, or"
            " checkpoint.accept_changes=true"
        )
        problems.append(Problem("MT609", "trainer.train_iters", None, rule, fix))
    return problems


def open_splits(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    corpus: Corpus,
    need: Sequence[str] = ("train", "validation"),
    requested: Sequence[int] | None = None,
) -> Splits:
    """Open a prepared corpus as samples.

    A split that is not in `need` becomes None if it is too small. `requested` is how many samples
    of each split the run takes, if that is known.

    Raises ConfigError for a vocabulary or a split that does not fit, CorruptData for files that do
    not add up.
    """
    data = data.without_excluded()
    if data.kind == "image_text":
        return _recorded(corpus, open_image_text(data, vocab_size, seed, corpus, need))
    if data.kind in CHATS:
        return _recorded(corpus, open_chats(data, vocab_size, seed, corpus, need))
    if corpus.prefix is None:
        return _synthetic(data, vocab_size, seed, corpus)
    eod = corpus.meta.get("eod")
    problems = _token_problems(data, vocab_size, corpus)
    splits = _open_text_splits(data, vocab_size, seed, corpus, need, requested, problems)
    train = splits["train"]
    if problems or train is None:
        raise ConfigError(problems)
    return Splits(
        corpus,
        train,
        splits["validation"],
        splits["test"],
        eod=eod,
        masked_eod=eod if data.eod_mask_loss else None,
        document_ends=() if eod is None else (eod,),
        dataset=train.dataset if isinstance(train, Samples) else None,
    )


def _recorded(corpus: Corpus, splits: Mapping[str, Any]) -> Splits:
    """Return the splits of records that are samples by themselves: chats, and texts with images."""
    return Splits(
        corpus,
        **splits,
        eod=corpus.meta["eod"],
        masked_eod=None,
        document_ends=(),
        dataset=None,
    )


def _synthetic(data: DataConfig, vocab_size: int, seed: int, corpus: Corpus) -> Splits:
    splits: dict[str, Any]
    ends = DOCUMENT_ENDS
    if data.whole_documents:
        splits = dict(mock.whole_documents(data, seed, vocab_size))
        ends = (mock.last_of(vocab_size),)
    else:
        splits = {name: MockSamples(data.length, seed, vocab_size, name) for name in SHARES}
    return Splits(corpus, **splits, eod=None, masked_eod=None, document_ends=ends, dataset=None)


def validation_of(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    tokenizer: Path | None,
    requested: Sequence[int] | None = None,
) -> Splits:
    """Return the splits of a configuration for a model with the given `tokenizer.json`.

    The result has a validation split. Text is tokenized with the model's tokenizer. Raises
    ConfigError if there is no validation split, or if another tokenizer made the tokens of a
    `.bin/.idx`.
    """
    corpus = prepare(data, tokenizer=tokenizer)
    splits = open_splits(data, vocab_size, seed, corpus, ("validation",), requested)
    made_by = splits.corpus.tokenizer_sha256
    if made_by is not None and tokenizer is not None:
        own = sha256_of(tokenizer)
        if own != made_by:
            rule = (
                f"cannot be evaluated because another tokenizer ({made_by[:12]}) than the model's"
                f" ({own[:12]}) made its tokens"
            )
            fix = f"data=indexed data.path=PREFIX of text that was tokenized with {tokenizer}"
            raise ConfigError.of("MT609", "data.path", data.path, rule, fix)
    return splits


def _token_problems(data: DataConfig, vocab_size: int, corpus: Corpus) -> list[Problem]:
    """Return a problem for each token id that the model or the data keys cannot use."""
    eod = corpus.meta.get("eod")
    problems = list[Problem]()
    problem = corpus.vocabulary_problem(vocab_size)
    if problem is not None:
        problems.append(problem)
    largest = corpus.meta.get("largest_id", -1)
    if largest >= vocab_size:
        rule = (
            f"cannot hold all ids because the manifest has token ids to {largest}, and the model"
            f" has ids 0 to {vocab_size - 1}"
        )
        fix = f"model.vocab_size={largest + 1}"
        problems.append(Problem("MT612", "model.vocab_size", vocab_size, rule, fix))
    if data.eod_mask_loss and eod is None:
        rule = "cannot mask the ends of documents because no end-of-document token is known"
        fix = "data.eod_mask_loss=false, or data.tokenizer=PATH of a tokenizer.json that has one"
        problems.append(Problem("MT608", "data.eod_mask_loss", True, rule, fix))
    for key, value, off in (
        ("packed", data.needs_document_ends, "false"),
        ("fim.rate", data.fim.rate, "0"),
    ):
        if value and eod is None:
            rule = "cannot find the ends of documents because no end-of-document token is known"
            fix = f"data.{key}={off}, or data.tokenizer=PATH of a tokenizer.json that has one"
            problems.append(Problem("MT608", f"data.{key}", value, rule, fix))
    if data.fim.rate and eod in (data.fim.ids or ()):
        rule = f"cannot mark parts of documents because id {eod} ends documents"
        marks = list(data.fim.ids or ())
        problems.append(Problem("MT355", "data.fim.ids", marks, rule, "three other ids"))
    return problems


def _open_text_splits(
    data: DataConfig,
    vocab_size: int,
    seed: int,
    corpus: Corpus,
    need: Sequence[str],
    requested: Sequence[int] | None,
    problems: list[Problem],
) -> dict[str, TextSamples | None]:
    """Return each split of `.bin/.idx` by its name; add the problems of needed ones to `problems`.

    Megatron's order depends on `requested`, the samples that a run takes of each split; None means
    one epoch.
    """
    # all splits are tried, so that one command reports the problems of each
    opener = _Opener(data, vocab_size, seed, corpus, requested)
    out: dict[str, TextSamples | None] = {}
    for name in SHARES:
        try:
            out[name] = opener.split(name)
        except ConfigError as error:
            out[name] = None
            if name in need or name == "train":
                problems.extend(error.problems)
    return out


class _Opener:
    """The settings with which every split of `.bin/.idx` is opened."""

    def __init__(
        self,
        data: DataConfig,
        vocab_size: int,
        seed: int,
        corpus: Corpus,
        requested: Sequence[int] | None,
    ) -> None:
        self.data = data
        self.vocab_size = vocab_size
        self.seed = seed
        self.requested = requested
        self.megatron = data.order == "megatron"
        self.blend = BlendOfDocuments if data.whole_documents else Blend
        self.own = {"validation": data.validation_blend, "test": data.test_blend}
        self.has_own_corpora = any(self.own.values())
        assert corpus.prefix is not None
        prefixes = {"train": (corpus.prefix, *corpus.others), **corpus.of_splits}
        self.datasets = {name: list(map(corpus.dataset, each)) for name, each in prefixes.items()}

    def split(self, name: str) -> TextSamples:
        """Return the samples of a split.

        Raises ConfigError if it has none.
        """
        # a corpus for one split only is used whole: `data.split` then divides nothing
        source = name if self.own.get(name) else "train"
        if self.has_own_corpora and source == "train" != name:
            raise ConfigError([_no_corpus(name)])
        datasets = self.datasets[source]
        if self.megatron:
            samples = self._in_megatron_order(name, datasets, whole=self.has_own_corpora)
        else:
            samples = self._keyed(name, datasets)
        total = getattr(samples, "total", None)
        if name == "train" and total is not None and self.requested and self.requested[0] > total:
            caps = self.data.blend_max_epochs
            if caps is None:
                problem = unweighted_problem(name, self.requested[0], total)
            else:
                problem = exhausted_problem(name, self.requested[0], total, caps)
            raise ConfigError([problem])
        return samples

    def _keyed(self, name: str, datasets: list[IndexedDataset]) -> TextSamples:
        """Return a split in the keyed order, which is computed sample by sample."""
        data = self.data
        # Evaluations read the first few samples. Shuffled, those represent the whole split, and
        # with a fixed seed they are the same in every run.
        order = self.seed if name == "train" else 0
        parts = [
            self._part(dataset, self._documents(dataset, name), order, name) for dataset in datasets
        ]
        if self._is_single(name):
            return parts[0]
        sizes = [dataset.num_tokens for dataset in datasets]
        if name == "train":
            caps = data.blend_max_epochs
            most = None
            if caps is not None:
                most = [int(cap * len(p)) for cap, p in zip(caps, parts, strict=True)]
            return self.blend(parts, self._plan(name) or sizes, order, name, most)
        shares = (self._weights(name) if self.own.get(name) else self._plan(name)) or sizes
        # an evaluation reads each sample once
        return self.blend(parts, shares, order, name, [len(part) for part in parts])

    def _documents(self, dataset: IndexedDataset, name: str) -> range:
        """Return the documents of a corpus that belong to a split."""
        if self.has_own_corpora:
            return range(dataset.num_documents)
        return split_documents(dataset, self.data.split)[SHARES.index(name)]

    def _part(self, dataset: IndexedDataset, documents: range, seed: int, name: str) -> Samples:
        """Return the samples of a range of documents of one corpus."""
        data = self.data
        if not data.whole_documents:
            return Samples(dataset, documents, data.length, seed, True, self.vocab_size, name)
        cache = user_path(data.cache_dir)
        return WholeDocuments(dataset, documents, Fit.of(data), seed, self.vocab_size, name, cache)

    def _plan(self, name: str) -> Sequence[float] | Plan | None:
        """Return the shares of the corpora, or how they change over the samples of training."""
        data = self.data
        if data.blend_curriculum is not None:
            return data.blend_curriculum if name == "train" else data.blend_curriculum[-1][1]
        if data.blend_sizes is not None:
            if name == "train":
                return by_sizes(data.blend_sizes)
            return [float(size) for size in data.blend_sizes]
        return data.blend_weights

    def _in_megatron_order(
        self, name: str, datasets: list[IndexedDataset], *, whole: bool
    ) -> TextSamples:
        """Return a split in Megatron-LM's order."""
        data = self.data
        requested = None if self.requested is None else self.requested[SHARES.index(name)]
        cache = user_path(data.cache_dir)
        folder = None if data.megatron_cache is None else user_path(data.megatron_cache)

        def part(dataset: IndexedDataset, count: int | None) -> megatron_order.MegatronSamples:
            sequences, shares = megatron_order.cut(len(dataset), data.split)[SHARES.index(name)]
            if whole:
                sequences = range(len(dataset))
            megatron_cache = None
            if folder is not None:
                megatron_cache = MegatronCache(folder, None if whole else shares)
            return megatron_order.MegatronSamples(
                dataset,
                sequences,
                data.length,
                self.seed,
                self.vocab_size,
                name,
                count,
                cache,
                megatron_cache,
            )

        if self._is_single(name):
            return part(datasets[0], requested)
        parts = [functools.partial(part, dataset) for dataset in datasets]
        return megatron_order.blended(parts, self._weights(name), requested, name)

    def _is_single(self, name: str) -> bool:
        """Return whether a split is one corpus without a blend around it.

        In Megatron's order this follows megatron-core, which blends where we would not.
        """
        own = self.own.get(name)
        blend = self.data.blend
        if own or blend is None:
            return not own or len(own) == 1
        return (
            self.megatron
            and len(blend) == 1
            and (self.has_own_corpora or self.data.blend_weights is None)
        )

    def _weights(self, name: str) -> Sequence[float] | None:
        if self.own.get(name):
            return self.data.validation_weights if name == "validation" else self.data.test_weights
        return self.data.blend_weights


def _no_corpus(name: str) -> Problem:
    rule = f"cannot be null because other splits have corpora of their own, and {name} has none"
    return Problem("MT605", f"data.{name}_blend", None, rule, f"data.{name}_blend=[PREFIX]")
