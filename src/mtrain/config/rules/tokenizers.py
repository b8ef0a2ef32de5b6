"""Tokenizer rules: a model keeps its tokenizer, because its weights mean nothing for other ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mtrain.config.compose.paths import user_path
from mtrain.config.disk.manifest import READ_BYTES, read_manifest
from mtrain.config.resolve.model_tokenizer import (
    folder_of_the_model,
    is_from_elsewhere,
    sha256_of,
    tokenizer_of,
    unread_tokenizer,
)
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.data import WEIGHTS_OF, read_corpora
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData

NONE: Change = {"data.tokenizer": None}


@rule(
    Code(
        "MT345",
        "A model that has a tokenizer keeps it: text is tokenized with it, and another one is"
        " refused.",
        says="data.tokenizer: is another tokenizer than the one that the model has",
        help=(
            "Leave data.tokenizer out, name the tokenizer.json of the model, or tokenize the corpus"
            " with that."
        ),
    ),
    reads=(
        "data.kind data.tokenizer data.path data.blend data.validation_blend data.test_blend"
        " data.blend_weights data.validation_weights data.test_weights checkpoint.resume"
        " checkpoint.init_from checkpoint.accept_changes"
    ),
    disk=True,
)
def own_tokenizer(run: RunConfig) -> Iterator[Finding]:
    """The tokenizer in use, or that made the corpus, belongs to the model."""
    d = run.data
    folder = folder_of_the_model(run)
    if folder is None or d.kind == "mock":
        return
    own = tokenizer_of(folder)
    if own is None:
        yield from _unknown(run, folder)
        return
    if run.checkpoint.accept_changes:
        return
    try:
        if d.tokenizer is not None and os.path.isfile(named := user_path(d.tokenizer)):
            yield from _same(named, own)
        elif d.kind == "indexed":
            yield from _made_by(run, own)
    except (OSError, CorruptData):  # other rules say what is wrong with a file
        return


def _unknown(run: RunConfig, folder: Path) -> Iterator[Finding]:
    """Yield imported weights whose tokenizer is missing: no new one replaces it."""
    if run.data.tokenizer is not None or run.data.kind not in ("text", "image_text"):
        return
    unread = unread_tokenizer(folder)
    if unread is not None:
        rule = (
            f"the model has {unread}, which is not read: without its tokenizer.json text gets"
            " other ids"
        )
    elif is_from_elsewhere(folder) and not run.checkpoint.accept_changes:
        rule = (
            f"{folder} has weights and no tokenizer.json: a tokenizer that is trained here gives"
            " text other ids"
        )
    else:
        return
    yield Finding(
        "MT345", "data.tokenizer", rule, hint="data.tokenizer=PATH of the model's tokenizer.json"
    )


def _same(named: Path, own: Path) -> Iterator[Finding]:
    ours = sha256_of(own)
    theirs = sha256_of(named)
    if ours != theirs:
        rule = (
            f"is another tokenizer ({theirs[:12]}) than the one that the model has, {own}"
            f" ({ours[:12]})"
        )
        yield Finding("MT345", "data.tokenizer", rule, ({"data.tokenizer": str(own)}, NONE))


def _made_by(run: RunConfig, own: Path) -> Iterator[Finding]:
    """Yield each corpus whose manifest names another tokenizer.json."""
    d = run.data
    ours = sha256_of(own)
    keys = {
        f"data.{key}": read_corpora(getattr(d, key), getattr(d, weights))
        for key, weights in WEIGHTS_OF.items()
    }
    for key, names in {
        "data.path": (d.path,) if d.path and d.blend is None else (),
        **keys,
    }.items():
        for name in names:
            held = None if "://" in name else read_manifest(user_path(name), READ_BYTES)
            theirs = None if held is None else held.tokenizer_sha256
            if theirs not in (None, ours):
                rule = (
                    f"{name} was made by another tokenizer ({str(theirs)[:12]}) than the model has,"
                    f" {own}"
                )
                hint = f"text that was tokenized with {own}"
                yield Finding("MT345", key, f"{rule} ({ours[:12]})", hint=hint)
                return


RULES = (own_tokenizer,)
