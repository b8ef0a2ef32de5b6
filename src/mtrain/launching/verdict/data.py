"""The data of a run next to that of a checkpoint. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits, open_splits, prepare_for_model
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
    own = model_tokenizer(run, checkpoint)
    if not _is_ready(run, own):
        return None
    need = ("train", "validation") if run.trainer.eval_iters else ("train",)
    corpus = prepare_for_model(run.data, own, accept_changes=run.checkpoint.accept_changes)
    return open_splits(run.data, run.model.vocab_size, run.trainer.seed, corpus, need, asked(run))


def _is_ready(run: RunConfig, own: Path | None) -> bool:
    data = run.data.without_excluded()
    if data.kind == "text":
        return seen(data, own if data.tokenizer is None else None) is not None
    if data.kind != "indexed":
        return False
    names = [name for name in data.blend or (data.path,) if name is not None]
    if any("://" in name for name in names):
        return False
    indexes = [(path := user_path(name)).with_name(f"{path.name}.idx") for name in names]
    return sum(index.stat().st_size for index in indexes if index.is_file()) <= READ_INDEXES
