"""Text to token ids and back, from a `tokenizer.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from mtrain import units
from mtrain.config.disk.files import kind_of
from mtrain.config.disk.token_files import EOD_NAMES, MAX_TOKENIZER
from mtrain.data.chat import ChatFormat
from mtrain.data.token_json import check_tokenizer
from mtrain.errors import ConfigError, CorruptData, Problem

LIMIT_BYTES = MAX_TOKENIZER
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """Encodes and decodes with a `tokenizer.json`.

    Raises ConfigError if the file is missing, CorruptData if it is not one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if kind := kind_of(self.path):
                fix = "data.tokenizer=PATH of a tokenizer.json"
                raise ConfigError(
                    [Problem("MT603", "data.tokenizer", str(path), f"is {kind}", fix)]
                )
            size = self.path.stat().st_size
            if size > LIMIT_BYTES:
                raise CorruptData(
                    f"{path}: {units.bytes_(size)}; a tokenizer may have"
                    f" {units.bytes_(LIMIT_BYTES)}"
                )
            text = self.path.read_bytes().decode()
        except OSError as error:
            fix = "data.tokenizer=PATH of a tokenizer.json"
            raise ConfigError(
                [
                    Problem(
                        "MT603",
                        "data.tokenizer",
                        str(path),
                        f"cannot be read: {error.strerror}",
                        fix,
                    )
                ]
            ) from error
        except UnicodeDecodeError as error:
            raise CorruptData(
                f"{path}: offset {error.start}: not UTF-8, so no tokenizer.json"
            ) from error
        check_tokenizer(self.path, text)
        with self._faults_named("no tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        # they are for batches of a model: texts would be cut, or padded to any length
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @contextmanager
    def _faults_named(self, what: str) -> Iterator[None]:
        """What the library raises, which is bare Exception or, where its own code fails, no
        Exception at all.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CorruptData(f"{self.path}: {what}: {str(error)[:500]}") from None

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eod(self) -> int | None:
        """Return id of the end-of-document token; None if no token has one of the names in use."""
        ids = (self._tokenizer.token_to_id(name) for name in EOD_NAMES)
        return next((i for i in ids if i is not None), None)

    def token_of(self, number: int) -> str | None:
        """Name of a token id; None if there is no such token."""
        return self._tokenizer.id_to_token(number)

    def id_of(self, token: str) -> int | None:
        """Return id of a token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """UTF-8 bytes of text that each token stands for, int64 [vocab_size]; special tokens have
        none.

        A token of a byte-level vocabulary has a letter for each byte, `<0x0A>` is one byte, and
        elsewhere a token is its own text, with a space for each ▁.
        """
        of_bytes = "ByteLevel" in str(json.loads(self._tokenizer.to_str())["decoder"])
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if number in added:
                counts[number] = 0 if added[number].special else len(token.encode())
            elif of_bytes:
                counts[number] = len(token)
            else:
                counts[number] = (
                    1 if BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
                )
        return counts

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text; no special tokens are added, and nothing is cut off or
        padded.

        Raises:
            CorruptData: the tokenizer cannot encode it, as where its unknown token is not in its
                vocabulary.
        """
        with self._faults_named("a text cannot be encoded"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_places(self, text: str) -> list[tuple[int, int]]:
        """Return each token id of a text with the character that it begins at; no special tokens
        are added.

        Raises:
            CorruptData: as `encode`.
        """
        with self._faults_named("a text cannot be encoded"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            (number, start) for number, (start, _) in zip(found.ids, found.offsets, strict=True)
        ]

    def encode_marked(
        self, text: str, parts: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Return token ids of a text, and which of them lie in its `parts`, each from a letter to
        the one behind its end.

        A part's tokens go from the one that has its first letter to the first one that has its last
        letter, as in transformers; letters that no token has, such as spaces, are passed over. No
        special tokens are added.

        Raises:
            CorruptData: the tokenizer cannot encode it.
        """
        with self._faults_named("a text cannot be encoded"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        ids = found.ids
        learned = [False] * len(ids)
        for part in parts:
            places = range(*part)
            first = next((at for i in places if (at := found.char_to_token(i)) is not None), None)
            last = next(
                (at for i in reversed(places) if (at := found.char_to_token(i)) is not None), None
            )
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
        """What one token stands for, as a person reads it: its text, or its name where it is a part
        of a letter.
        """
        with self._faults_named("an id cannot be decoded"):
            text = self._tokenizer.decode([number], skip_special_tokens=False)
            name = self._tokenizer.id_to_token(number)
        return text if name is None or (text and "\ufffd" not in text) else name

    @cached_property
    def beginning(self) -> list[int]:
        """Return ids of the special tokens that every text begins with, such as that of `<s>`."""
        with self._faults_named("a text cannot be encoded"):
            ids = self._tokenizer.encode("").ids
        return [number for number in ids if number != self.eod]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        with self._faults_named("ids cannot be decoded"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def end_of(tokenizer: Tokenizer) -> int:
    """Return id of the token that ends a document: the `eos_token` of the tokenizer_config.json
    beside the file, else a name in use, else BERT's separator.

    Raises:
        ConfigError: there is none.
    """
    settings = ChatFormat(tokenizer.path.parent)
    names = (settings.special("eos_token"), *EOD_NAMES, settings.special("sep_token"), "[SEP]")
    found = next((i for name in names if name and (i := tokenizer.id_of(name)) is not None), None)
    if found is None:
        rule = (
            f"{tokenizer.path} has no token that ends a document: none has a name in use"
            f" ({', '.join(EOD_NAMES)})"
        )
        fix = f'"eos_token" in a tokenizer_config.json beside {tokenizer.path}'
        raise ConfigError([Problem("MT608", "data.tokenizer", str(tokenizer.path), rule, fix)])
    return found
