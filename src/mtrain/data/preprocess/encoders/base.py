"""The interface of all tokenizers: texts become ids, packed in the dtype of the corpus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mtrain.data.preprocess.encoders.pieces import MANY, Pieces
from mtrain.data.preprocess.encoders.spec import TokenizerSpec
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError, Problem

CODES = {"uint16": "H", "int32": "i"}
CHECKED = 32
"""Texts for which each process compares the pieces with the whole."""


@contextmanager
def named_faults(file: str, what: str) -> Iterator[None]:
    """Turn errors of a library into CorruptData.

    It raises bare Exception or, from a panic in Rust, a BaseException.
    """
    try:
        yield
    except (MtrainError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptData(f"{file}: {what}: {' '.join(str(error).split())[:300]}") from None


def library(name: str, extra: str, what: str) -> Any:
    """Return a module of an extra.

    Raises:
        BadEnvironment: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise BadEnvironment(
            f"{what} needs {name.partition('.')[0]}, which is not installed",
            f"  fix: pip install 'mtrain[{extra}]'",
        ) from error


class OtherIds(CorruptData):
    """An error: a faster library gives other ids than the tokenizer's own."""


class Encoder(ABC):
    """A loaded tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    eod: int | None
    """Id that ends a document, if known."""
    unk: int | None = None
    """Id of the unknown token."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        self.file = spec.files[0]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around them."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens with their names."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if there is no token of this name."""

    def unknown_bytes(self, text: str) -> int:
        """Return bytes of a text that the unknown token stands for."""
        return 0

    def packer(self, code: str) -> Packer:
        """Return a packer of texts to items of an `array` code."""
        return Packer(self, code, None)

    def chosen_eod(self, found: int | None) -> int | None:
        """Return the id of the token that the user chose to end documents, or `found` without one.

        Raises:
            ConfigError: there is no token of the chosen name.
        """
        name = self.spec.eod_token
        if name is None:
            return found
        number = self.id_of(name)
        if number is None:
            rule = f"{self.file} has no token of this name"
            raise ConfigError(
                [
                    Problem(
                        "MT603",
                        "eod_token",
                        name,
                        rule,
                        "eod_token=NAME of a token",
                        "command line",
                    )
                ]
            )
        return number


class Packer:
    """A packer of texts to the bytes of their ids."""

    engine = "tokenizers"
    """The library that encodes with the tokenizer.json."""
    passed_over = ""
    """The reason not to use an installed faster library, or empty."""

    def __init__(self, encoder: Encoder, code: str, pieces: Pieces | None) -> None:
        self._encoder = encoder
        self._code = code
        self._pieces = pieces
        self._checked = 0

    @property
    def many(self) -> int:
        """Return how many characters of texts are best packed at once."""
        return MANY if self._pieces is None else self._pieces.many

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text.

        Raises:
            CorruptData: the tokenizer cannot encode one, or an id does not fit the dtype.
        """
        if self._pieces is None:
            return self._whole(texts)
        with named_faults(self._encoder.file, "a text cannot be encoded"):
            packed = self._pieces.pack(texts)
        if self._checked < CHECKED:
            self._checked += len(texts[:CHECKED])
            if packed[:CHECKED] != self._whole(texts[:CHECKED]):
                self._pieces = None  # this version of the library cuts in another way
                return self._whole(texts)
        return packed

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        with named_faults(self._encoder.file, "a text cannot be encoded"):
            found = self._encoder.encode(texts)
        try:
            return [array(self._code, ids).tobytes() for ids in found]
        except OverflowError:
            worst = max(max(ids, default=0) for ids in found)
            raise CorruptData(
                f"{self._encoder.file}: token id {worst} does not fit the dtype of the corpus"
            ) from None
