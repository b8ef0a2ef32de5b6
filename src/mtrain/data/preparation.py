"""Preparation of the corpus of a configuration, before ranks start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtrain.config.resolve.defaults import CHATS
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.chats import prepare as chats
from mtrain.data.image_text import samples as image_text
from mtrain.data.store.corpus import Corpus
from mtrain.data.text import tokenize as text
from mtrain.data.text.tokenize import say_to_stderr
from mtrain.errors import ConfigError, Problem


def prepare(
    data: DataConfig, note: Callable[[str], None] = say_to_stderr, tokenizer: Path | None = None
) -> Corpus:
    """Make the corpus of a configuration ready.

    See `prepare` of `text.tokenize`, `chats.prepare` and `image_text.samples` for what that does
    and raises.
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
    rule = f"its tokenizer ({made_by[:12]}) is not the one of the model, {model} ({own[:12]})"
    raise ConfigError([Problem("MT345", key, value, rule, fix)])
