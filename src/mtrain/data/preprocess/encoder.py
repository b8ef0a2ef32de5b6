"""The tokenizer that a user names, and the interface of a loaded one."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain import units
from mtrain.config.disk.files import kind_of
from mtrain.config.disk.token_files import MAX_TOKENIZER
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.data.preprocess.pieces import BATCH_CHARS, Pieces
from mtrain.data.text.tokenizer import named_faults
from mtrain.errors import BadEnvironment, ConfigError, CorruptData

KINDS = ("tokenizer.json", "sentencepiece", "tiktoken", "gpt2", "bert")
# Kind, and the files of it that a folder has, in the order in which they are looked for
IN_A_FOLDER = (
    ("tokenizer.json", ("tokenizer.json",)),
    ("sentencepiece", ("tokenizer.model",)),
    ("sentencepiece", ("spiece.model",)),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("bert", ("vocab.txt",)),
)
FIX = (
    "tokenizer=PATH of a tokenizer.json, *.model, *.tiktoken, vocab.json (with merges=), vocab.txt,"
    " or their folder"
)


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer on the disk, and the user's choices for it."""

    kind: str
    """One of KINDS."""
    files: tuple[str, ...]
    plain: bool = False
    """True if the name of a special token in a text is encoded as characters, not as that token."""
    eod_token: str | None = None
    """The token that ends a document; None for the tokenizer's own."""
    lower_case: bool = True
    """`bert`: whether texts are lowered."""
    pattern: str = "v2"
    """`tiktoken`: the regular expression that cuts texts, or its name."""
    special_tokens: tuple[tuple[str, int], ...] = ()
    """`tiktoken`: name and id of each."""
    num_special_tokens: int = 1000
    """The JSON form of `tiktoken`: ids before the first token."""
    vocab_size: int | None = None
    """The JSON form of `tiktoken`: tokens beyond are left out."""
    engine: str = "auto"
    """The library that encodes with a tokenizer.json: `tokenizers`, `gigatoken`, or `auto`, which
    is gigatoken if it is installed and gives the same ids on a sample.
    """
    digests: tuple[str, ...] = field(default=(), compare=False)
    """sha256 of the files."""

    @property
    def sha256(self) -> str:
        """Return the digest of the file, or a digest of the digests of several."""
        if len(self.digests) == 1:
            return self.digests[0]
        return hashlib.sha256("|".join(self.digests).encode()).hexdigest()


def find_tokenizer(
    path: Path, merges: Path | None = None, kind: str | None = None, **options: object
) -> TokenizerSpec:
    """Return the tokenizer of a file, by its name and beginning, or of a folder, by its files.

    Raises:
        ConfigError: the path does not exist, or is not a known tokenizer.
        CorruptData: a file is too large for a tokenizer.
    """
    if os.path.isdir(path):
        chosen, files = _in_folder(path, kind)
    else:
        readable(path)
        chosen = kind or _kind_of_file(path, merges)
        files = [path]
        if chosen == "gpt2":
            files.append(merges or path.with_name("merges.txt"))
    for file in files:
        readable(file)
    if options.get("engine") == "gigatoken" and chosen not in ("tokenizer.json", "gpt2", "bert"):
        rule = f"cannot encode because it needs a tokenizer.json, and this tokenizer is {chosen}"
        raise ConfigError.of(
            "MT603", "engine", "gigatoken", rule, "engine=tokenizers", "command line"
        )
    digests = tuple(sha256_of(file) for file in files)
    names = tuple(map(os.fspath, files))
    return TokenizerSpec(chosen, names, digests=digests, **options)  # type: ignore[arg-type]


def _in_folder(path: Path, kind: str | None) -> tuple[str, list[Path]]:
    """Return the first tokenizer in a folder, or the first of a kind: its kind and its files."""
    for of, names in IN_A_FOLDER:
        files = [path / name for name in names]
        if all(map(os.path.isfile, files)):
            found = _kind_of_model(files[0]) if of == "sentencepiece" else of
            if kind in (None, found):
                return found, files
    wanted = f"no tokenizer of the kind {kind}" if kind else "no known tokenizer"
    raise _wrong(path, f"cannot be used because the folder has {wanted}")


def readable(path: Path) -> None:
    """Refuse a file that is not regular, cannot be read or is too large.

    Raises:
        ConfigError: it is not a regular file, or cannot be read.
        CorruptData: it is too large.
    """
    try:
        # the kind first: to open a pipe would wait for its writer
        kind = kind_of(path)
        if not kind:
            with open(path, "rb") as file:
                file.read(1)
    except (OSError, ValueError) as error:
        raise _wrong(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if kind:
        raise _wrong(path, f"is {kind}")
    if (size := path.stat().st_size) > MAX_TOKENIZER:
        raise CorruptData(
            f"{path}: {units.bytes_(size)}; a tokenizer may have {units.bytes_(MAX_TOKENIZER)}"
        )


def _kind_of_file(path: Path, merges: Path | None) -> str:
    if path.suffix == ".json":
        return _kind_of_json(path, merges)
    if path.suffix == ".tiktoken":
        return "tiktoken"
    if path.suffix == ".model":
        return _kind_of_model(path)
    if path.suffix == ".txt":
        return "bert"
    rule = "cannot be used because its name has no ending of a tokenizer"
    raise _wrong(path, rule, f"{FIX}, or kind={'|'.join(KINDS)}")


def _kind_of_json(path: Path, merges: Path | None) -> str:
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: not JSON: {str(error)[:200]}") from None
    # Megatron-LM's form of tiktoken is a list of tokens and ranks
    if isinstance(body, list):
        return "tiktoken"
    if merges is not None or (
        isinstance(body, dict) and "model" not in body and path.with_name("merges.txt").is_file()
    ):
        return "gpt2"
    return "tokenizer.json"


def _kind_of_model(path: Path) -> str:
    """Return the kind of a tokenizer.model."""
    readable(path)
    # Llama 3 has a file of tiktoken under this name: lines of base64 and a number
    with open(path, "rb") as file:
        words = file.read(256).split(b"\n")[0].split()
    return "tiktoken" if len(words) == 2 and words[1].isdigit() else "sentencepiece"


def _wrong(path: Path, rule: str, fix: str = FIX) -> ConfigError:
    return ConfigError.of("MT603", "tokenizer", str(path), rule, fix, "command line")


CODES = {"uint16": "H", "int32": "i"}
# Texts for which each process compares the pieces with the whole
CHECKED = 32


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
    """The error that a faster library gives other ids than the tokenizer's own."""


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
        """Return how many bytes of a text became the unknown token."""
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
            rule = f"cannot end documents because {self.file} has no token of this name"
            raise ConfigError.of(
                "MT603", "eod_token", name, rule, "eod_token=NAME of a token", "command line"
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
    def batch_chars(self) -> int:
        """Return how many characters of texts are best packed at once."""
        return BATCH_CHARS if self._pieces is None else self._pieces.batch_chars

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text.

        Raises:
            CorruptData: the tokenizer cannot encode one, or an id does not fit the dtype.
        """
        if self._pieces is None:
            return self._whole(texts)
        with named_faults(self._encoder.file, "a text cannot be encoded"):
            packed = self._pieces.pack(texts)
        # The cuts are known for the library's versions so far. In each process, the first texts
        # show whether this version cuts differently; from then on, texts are encoded whole.
        if self._checked < CHECKED:
            self._checked += len(texts[:CHECKED])
            if packed[:CHECKED] != self._whole(texts[:CHECKED]):
                self._pieces = None
                return self._whole(texts)
        return packed

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        with named_faults(self._encoder.file, "a text cannot be encoded"):
            encoded = self._encoder.encode(texts)
        try:
            return [array(self._code, ids).tobytes() for ids in encoded]
        except OverflowError:
            worst = max(max(ids, default=0) for ids in encoded)
            raise CorruptData(
                f"{self._encoder.file}: token id {worst} does not fit the dtype of the corpus"
            ) from None
