"""A `tokenizer.json`: its check, the tokenizer that encodes and decodes with it, and training."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtrain import units
from mtrain.config.disk.files import kind_of
from mtrain.config.disk.token_files import EOD_NAMES, MAX_TOKENIZER
from mtrain.data.chats.template import ChatFormat
from mtrain.errors import ConfigError, CorruptData, MtrainError

# The largest token id: tables have an entry for each id, and known vocabularies are ten times
# smaller.
MAX_ID = 1 << 24
# Characters that the steps of a tokenizer may make of one
MAX_GROWTH = 4096
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_LETTERS = ("content", "prepend", "replacement")


def check_tokenizer(path: Path, text: str) -> None:
    """Check a `tokenizer.json` before the tokenizers library, which trusts its sizes, reads it.

    Source: the JSON of Hugging Face's tokenizers 0.23, and the header of sentencepiece's
    `precompiled_charsmap`.

    Raises:
        CorruptData: it is not a JSON object, a token id is too large, a step makes far more text
            than it gets, or a table of characters has not the size that it declares.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: not a tokenizer.json: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise CorruptData(f"{path}: not a tokenizer.json: not a JSON object")
    # the library allocates an entry for every id up to the largest
    largest = max(_ids(body), default=0)
    if largest > MAX_ID:
        raise CorruptData(
            f"{path}: not a tokenizer.json: it has the token id {str(largest)[:20]}, over {MAX_ID}"
        )
    for name in _STEPS:
        # every step may replace each character by a text, so their growths multiply
        steps = list(_dicts(body.get(name)))
        growth = prod(
            max(1, len(step[key]))
            for step in steps
            for key in _LETTERS
            if isinstance(step.get(key), str)
        )
        if growth > MAX_GROWTH:
            raise CorruptData(
                f"{path}: not a tokenizer.json: its {name} can make {str(growth)[:20]} letters of"
                " one"
            )
        for step in steps:
            if "precompiled_charsmap" in step and not _is_charsmap(step["precompiled_charsmap"]):
                raise CorruptData(
                    f"{path}: not a tokenizer.json: the precompiled_charsmap of its {name} is cut"
                    " or altered"
                )


def _ids(body: dict[str, Any]) -> Iterator[int]:
    model = body.get("model")
    added = body.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    yield from (number for number in ids if type(number) is int)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_charsmap(value: Any) -> bool:
    """Return whether a value is a length, a table of words of four bytes, and UTF-8 text."""
    try:
        data = base64.b64decode(value, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except (binascii.Error, TypeError, ValueError):
        return False
    return len(data) >= 4 and size % 4 == 0 and size <= len(data) - 4


@contextmanager
def named_faults(file: str | Path, what: str) -> Iterator[None]:
    """Turn errors of a library into CorruptData; its own errors and MemoryError pass through."""
    try:
        yield
    except (MtrainError, MemoryError):
        raise
    except BaseException as error:
        # libraries raise bare Exception, and a panic in Rust is only a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptData(f"{file}: {what}: {' '.join(str(error).split())[:300]}") from None


LIMIT_BYTES = MAX_TOKENIZER
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A tokenizer from a `tokenizer.json`: encodes and decodes.

    Raises ConfigError if the file is missing, CorruptData if it is not a tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if kind := kind_of(self.path):
                fix = "data.tokenizer=PATH of a tokenizer.json"
                raise ConfigError.of("MT603", "data.tokenizer", str(path), f"is {kind}", fix)
            size = self.path.stat().st_size
            if size > LIMIT_BYTES:
                raise CorruptData(
                    f"{path}: {units.bytes_(size)}; a tokenizer may have"
                    f" {units.bytes_(LIMIT_BYTES)}"
                )
            text = self.path.read_bytes().decode()
        except OSError as error:
            fix = "data.tokenizer=PATH of a tokenizer.json"
            rule = f"cannot be read: {error.strerror}"
            raise ConfigError.of("MT603", "data.tokenizer", str(path), rule, fix) from error
        except UnicodeDecodeError as error:
            raise CorruptData(
                f"{path}: offset {error.start}: not UTF-8, so not a tokenizer.json"
            ) from error
        check_tokenizer(self.path, text)
        with named_faults(self.path, "not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        # meant for the batches of a model, they would cut or pad texts here
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eod(self) -> int | None:
        """Return the id of the end-of-document token; None if no token has a known name."""
        ids = (self._tokenizer.token_to_id(name) for name in EOD_NAMES)
        return next((i for i in ids if i is not None), None)

    def token_of(self, number: int) -> str | None:
        """Return the name of a token id; None if there is no such token."""
        return self._tokenizer.id_to_token(number)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """Return the UTF-8 bytes of each token's text, int64 [vocab_size], 0 for special tokens.

        A token of a byte-level vocabulary has a letter for each byte, `<0x0A>` is one byte, and
        any other token is its own text, with a space for each ▁.
        """
        of_bytes = "ByteLevel" in str(json.loads(self._tokenizer.to_str())["decoder"])
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number in added:
                counts[number] = 0 if added[number].special else len(token.encode())
            elif of_bytes:
                counts[number] = len(token)
            elif BYTE.fullmatch(token):
                counts[number] = 1
            else:
                counts[number] = len(token.replace("▁", " ").encode())
        return counts

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without added special tokens, truncation or padding.

        Raises:
            CorruptData: the tokenizer cannot encode it, for example because its unknown token is
                not in its vocabulary.
        """
        with named_faults(self.path, "a text cannot be encoded"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_places(self, text: str) -> list[tuple[int, int]]:
        """Return each token id of a text with the place of its first character.

        No special tokens are added.

        Raises:
            CorruptData: as `encode`.
        """
        with named_faults(self.path, "a text cannot be encoded"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            (number, start)
            for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def encode_marked(
        self, text: str, parts: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a text, and whether each lies in one of its `parts`, given as
        spans of characters.

        As in transformers, a part's tokens go from the one with its first character to the first
        one with its last character; characters without a token, such as spaces, are skipped. No
        special tokens are added.

        Raises:
            CorruptData: the tokenizer cannot encode it.
        """
        with named_faults(self.path, "a text cannot be encoded"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        learned = [False] * len(ids)
        for part in parts:
            tokens = map(encoding.char_to_token, range(*part))
            first = next((token for token in tokens if token is not None), None)
            tokens = map(encoding.char_to_token, reversed(range(*part)))
            last = next((token for token in tokens if token is not None), None)
            if first is not None and last is not None:
                learned[first : last + 1] = [True] * (last + 1 - first)
        return ids, learned

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Return the texts of the special tokens."""
        return tuple(
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        )

    def text_of(self, number: int) -> str:
        """Return a token for a reader: its text, or its name if it is a part of a character."""
        with named_faults(self.path, "an id cannot be decoded"):
            text = self._tokenizer.decode([number], skip_special_tokens=False)
            name = self._tokenizer.id_to_token(number)
        return text if name is None or (text and "\ufffd" not in text) else name

    @cached_property
    def beginning(self) -> list[int]:
        """Return the ids of the special tokens that begin every text, such as `<s>`."""
        with named_faults(self.path, "a text cannot be encoded"):
            ids = self._tokenizer.encode("").ids
        return [number for number in ids if number != self.eod]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        with named_faults(self.path, "ids cannot be decoded"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def end_of_document_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document.

    It is the `eos_token` of the tokenizer_config.json next to the file, else a token with a known
    name, else BERT's separator.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    settings = ChatFormat(tokenizer.path.parent)
    names = (settings.special("eos_token"), *EOD_NAMES, settings.special("sep_token"), "[SEP]")
    for name in names:
        number = tokenizer.id_of(name) if name else None
        if number is not None:
            return number
    rule = (
        "cannot be used because it has no token that ends a document: no token has a known name"
        f" ({', '.join(EOD_NAMES)})"
    )
    fix = f'"eos_token" in a tokenizer_config.json next to {tokenizer.path}'
    raise ConfigError.of("MT608", "data.tokenizer", str(tokenizer.path), rule, fix)


EOD_TOKEN = "<|endoftext|>"
EOD = 0
# The BPE is trained on the first documents up to this size: a fair sample, as they are shuffled
TRAIN_BYTES = 64 * units.MIB
BATCH_CHARS = 4 * units.MIB


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
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


def encode_documents(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], eod: int = EOD
) -> Iterator[Encoded]:
    """Encode documents in batches, each document with `eod` at its end.

    RAYON_NUM_THREADS sets the number of threads. In a document, `<|endoftext|>` is plain text and
    does not end it.
    """
    # else a document that mentions the end-of-document token would end there
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
    # filled with the id that ends documents, which stays after each of them
    tokens = np.full(int(lengths.sum()), eod, np.int64)
    start = 0
    for document, length in zip(ids, lengths, strict=True):
        tokens[start : start + length - 1] = document
        start += length
    return Encoded(tokens, lengths)
