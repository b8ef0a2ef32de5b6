"""The data of a run next to that of a checkpoint. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer, sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.config.schema.run import RunConfig
from mtrain.data import Corpus, Splits, open_splits, prepare_for_model
from mtrain.data.splits import data_problems
from mtrain.data.text.tokenize import seen
from mtrain.errors import Problem
from mtrain.units import MIB

READ_INDEXES = 64 * MIB
"""Indexes of a corpus that are read for an answer within a second."""


def problems(run: RunConfig, manifest: Mapping[str, Any], splits: Splits) -> list[Problem]:
    """Return a problem for each difference from the data of a checkpoint; none if accepted."""
    saved = manifest["state"].get("data")
    if saved is None or run.checkpoint.accept_changes:
        return []
    return data_problems(saved, splits.identity())


def opened(run: RunConfig, checkpoint: Path) -> Splits | None:
    """Return the samples of a run if that takes a moment; None: a run prepares its data first.

    Raises:
        MtrainError: the data is invalid, as it would be for a run.
    """
    corpus = _ready(run, model_tokenizer(run, checkpoint))
    if corpus is None:
        return None
    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    return open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))


def _ready(run: RunConfig, own: Path | None) -> Corpus | None:
    """Return the corpus of a run for a model whose tokenizer is `own`; None: it takes a while."""
    data = run.data.without_excluded()
    if data.kind == "text":
        return _tokenized(data, own)
    names = [name for name in data.blend or (data.path,) if name is not None]
    if data.kind != "indexed" or any("://" in name for name in names):
        return None
    indexes = [(path := user_path(name)).with_name(f"{path.name}.idx") for name in names]
    if sum(index.stat().st_size for index in indexes if index.is_file()) > READ_INDEXES:
        return None
    return prepare_for_model(run.data, own, accept_changes=run.checkpoint.accept_changes)


def _tokenized(data: DataConfig, own: Path | None) -> Corpus | None:
    """Return the tokens of a text that were made before, by the tokenizer of the model."""
    if data.tokenizer is not None or own is None:
        return seen(data)
    corpus = seen(data)
    # the model's tokenizer may have been trained on this text
    if corpus is not None and corpus.tokenizer_sha256 == sha256_of(own):
        return corpus
    return seen(data, own)
