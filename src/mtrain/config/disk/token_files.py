"""Headers of Megatron's `.bin/.idx` and of `tokenizer.json`, read in part and without numpy.

`.idx`, little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 number of
sequences, uint64 number of document indices (documents + 1), int32 length of each sequence in
tokens, int64 pointer to each sequence in bytes, int64 document indices (a document is the sequences
from one index to the next). `.bin` is the tokens of all sequences, nothing else.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from mtrain.errors import CorruptData
from mtrain.units import MIB, bytes_

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# The dtype codes of token files. 6 and 7 are floating-point numbers and no token ids.
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
MAX_TOKENIZER = 128 * MIB
# The size up to which `check` reads a tokenizer.json, in a fraction of a second.
READ_TOKENIZER = 16 * MIB
# Models of a tokenizer.json whose vocabulary is a mapping; Unigram's is a list.
MAPPED = ("BPE", "WordPiece", "WordLevel")
# Names of end-of-document tokens in use, in the order in which they are tried.
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<eod>")


@dataclass(frozen=True)
class Header:
    """The first bytes of an `.idx`."""

    code: int
    """One of CODES."""
    count: int
    """The number of sequences."""
    indices: int
    """The number of document indices: documents + 1."""

    @property
    def item_bytes(self) -> int:
        """Return the bytes of a token."""
        return struct.calcsize(f"<{_LETTERS[self.code]}")

    @property
    def pointers_at(self) -> int:
        """Return the offset of the pointers."""
        return HEADER.size + 4 * self.count

    @property
    def documents_at(self) -> int:
        """Return the offset of the document indices."""
        return self.pointers_at + 8 * self.count


def read_header(path: Path, head: bytes, size: int) -> Header:
    """Return the header in the first bytes of an `.idx` of `size` bytes.

    Raises:
        CorruptData: it is inconsistent; the message has the offset.
    """
    if size < HEADER.size:
        raise CorruptData(f"{path}: {size} bytes, and a header has {HEADER.size}")
    magic, version, code, count, indices = HEADER.unpack(head[: HEADER.size])
    if magic != MAGIC:
        raise CorruptData(
            f"{path}: offset 0: starts with {magic!r}, not with {MAGIC!r}: no Megatron index"
        )
    if version != 1:
        raise CorruptData(f"{path}: offset 9: version {version}, only 1 is known")
    if code not in CODES:
        known = ", ".join(f"{c} {name}" for c, name in CODES.items())
        raise CorruptData(f"{path}: offset 17: dtype code {code} is not one of tokens ({known})")
    expected = HEADER.size + 12 * count + 8 * indices
    # Megatron's multimodal writer adds a byte per sequence; only the file's size reveals it.
    if size == expected + count and count:
        raise CorruptData(
            f"{path}: a multimodal index (one mode byte per sequence); only text is read"
        )
    if size != expected:
        raise CorruptData(
            f"{path}: offset 18: {count} sequences and {indices} document indices need {expected}"
            f" bytes, the file has {size}"
        )
    if indices < 1:
        raise CorruptData(f"{path}: offset 26: no document indices; even an empty corpus has one")
    return Header(code, count, indices)


class Documents(Protocol):
    """An interface to the document starts of a corpus."""

    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def document_start(self, document: int) -> int:
        """Return the place of a document's first token in the stream; for `num_documents`, the end
        of the stream.
        """
        ...


class TokenFiles:
    """A corpus of `.bin/.idx` that reads only the requested places.

    Raises CorruptData with file and offset if header, ends and sizes are inconsistent, and OSError
    for an unreadable file. Opening the corpus for training checks the rest.
    """

    def __init__(self, prefix: Path) -> None:
        self.idx, self.bin = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
        self._file = open(self.idx, "rb")  # noqa: SIM115
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.header = header = read_header(self.idx, self._file.read(HEADER.size), size)
            # A header and its ends show a truncated or mismatched file without reading gigabytes.
            first = self._document(0)
            last = self._document(header.indices - 1)
            if first != 0 or last != header.count:
                raise CorruptData(
                    f"{self.idx}: offset {header.documents_at}: document indices go from {first} to"
                    f" {last}, must be 0 to {header.count}"
                )
            end = 0
            if header.count:
                (length,) = self._at(HEADER.size + 4 * (header.count - 1), "<i")
                end = self._pointer(header.count - 1) + length * header.item_bytes
            held = os.stat(self.bin).st_size
            if held != end:
                raise CorruptData(
                    f"{self.bin}: {held} bytes, but {self.idx.name} describes {end}"
                    f" ({end // header.item_bytes} tokens of {header.item_bytes} bytes)"
                )
            self.num_tokens = end // header.item_bytes
        except BaseException:
            self._file.close()
            raise

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return self.header.indices - 1

    def document_start(self, document: int) -> int:
        """Return the place of a document's first token in the stream; for `num_documents`, the end
        of the stream.
        """
        sequence = self._document(document)
        count = self.header.count
        if not 0 <= sequence <= count:
            raise CorruptData(
                f"{self.idx}: document {document} begins at sequence {sequence}, and there are"
                f" {count}"
            )
        if sequence < count:
            start = self._pointer(sequence)
        else:
            start = self.num_tokens * self.header.item_bytes
        if (
            start % self.header.item_bytes
            or not 0 <= start <= self.num_tokens * self.header.item_bytes
        ):
            raise CorruptData(
                f"{self.idx}: the pointer of sequence {sequence} is {start}, where no token begins"
            )
        return start // self.header.item_bytes

    def ids(self, start: int, count: int) -> tuple[int, int] | None:
        """Return the smallest and largest of `count` token ids from a place of the stream on; None
        if there are none.
        """
        tokens = array(_LETTERS[self.header.code])
        size = self.header.item_bytes
        with open(self.bin, "rb") as file:
            file.seek(start * size)
            data = file.read(count * size)
        tokens.frombytes(data[: len(data) // size * size])
        return (min(tokens), max(tokens)) if tokens else None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _document(self, document: int) -> int:
        return int(self._at(self.header.documents_at + 8 * document, "<q")[0])

    def _pointer(self, sequence: int) -> int:
        return int(self._at(self.header.pointers_at + 8 * sequence, "<q")[0])

    def _at(self, offset: int, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        data = os.pread(self._file.fileno(), size, offset) if offset >= 0 else b""
        if len(data) < size:
            raise CorruptData(
                f"{self.idx}: an index in it leads to offset {offset}, where nothing is"
            )
        return struct.unpack(form, data)


def split_documents(corpus: Documents, shares: Sequence[float]) -> list[range]:
    """Split the documents into consecutive ranges, one per share, as close to the shares of
    *tokens* as whole documents allow.

    At least one share is positive. Each positive share gets a document, if there are enough.
    """
    count = corpus.num_documents
    tokens = corpus.num_tokens
    total = float(sum(shares))
    bounds = [0]
    share = 0.0
    for part in shares[:-1]:
        share += part
        target = round(tokens * share / total)
        # The starts rise with the documents, so a search reads a few of them instead of all.
        cut = bisect_left(range(count), target, key=corpus.document_start)
        if (
            cut > 0
            and target - corpus.document_start(cut - 1) < corpus.document_start(cut) - target
        ):
            cut -= 1
        bounds.append(max(cut, bounds[-1]))
    bounds.append(count)
    wanted = [int(part > 0) for part in shares]
    # Rounding may leave a small share without a document; take one from its neighbour, from the
    # front and then from the back.
    if count >= sum(wanted):
        for i in range(len(shares)):
            bounds[i + 1] = max(bounds[i + 1], bounds[i] + wanted[i])
        bounds[-1] = count
        for i in reversed(range(len(shares))):
            bounds[i] = min(bounds[i], bounds[i + 1] - wanted[i])
    return [range(a, b) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts of a tokenizer.json."""

    vocab_size: int
    """One more than the largest token id."""
    eod: int | None
    """The id of the end-of-document token, if it has a known name."""


def tokenizer_facts(path: Path) -> TokenizerFacts | None:
    """Return the facts of a tokenizer.json; None if it is too large to read quickly.

    Raises:
        CorruptData: it is no valid tokenizer.json.
        OSError: it cannot be read.
    """
    stamp = path.stat()
    if stamp.st_size > MAX_TOKENIZER:
        raise CorruptData(
            f"{path}: {bytes_(stamp.st_size)}; a tokenizer may have {bytes_(MAX_TOKENIZER)}"
        )
    if stamp.st_size > READ_TOKENIZER:
        return None
    return _facts(path, (stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, stamp.st_ino))


@lru_cache(maxsize=4)
def _facts(path: Path, stamp: tuple[int, ...]) -> TokenizerFacts:
    """Return the facts of a file, cached while its `stamp` stays the same."""
    try:
        body = json.loads(path.read_bytes().decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise CorruptData(
            f"{path}: offset {error.start}: not UTF-8, so no tokenizer.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: no tokenizer.json: {error}") from error
    try:
        ids = _ids(body)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise CorruptData(f"{path}: no tokenizer.json: it has no model with a vocabulary") from None
    eod = next((ids[name] for name in EOD_NAMES if name in ids), None)
    return TokenizerFacts(max(ids.values(), default=-1) + 1, eod)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _ids(body: Any) -> dict[str, int]:
    """Return token -> id for a BPE, WordPiece or WordLevel model (a mapping) or Unigram (a list),
    and the added tokens.

    As in Hugging Face's tokenizers, an added token that the model lacks gets the next free id.
    """
    kind = body["model"].get("type")
    vocab = body["model"]["vocab"]
    if kind not in (*MAPPED, "Unigram", None) or (
        kind and isinstance(vocab, dict) != (kind in MAPPED)
    ):
        raise TypeError
    if isinstance(vocab, dict):
        ids = dict(vocab)
    else:
        ids = {str(entry[0]): i for i, entry in enumerate(vocab)}
    # The numbering of the `tokenizers` library: such tokens follow the vocabulary, and each other.
    own = len(ids)
    last = -1
    for token in body.get("added_tokens") or ():
        last = ids.setdefault(token["content"], last + 1 if last >= own else own)
    if not all(type(i) is int and 0 <= i < 1 << 32 for i in ids.values()):
        raise TypeError
    return ids
