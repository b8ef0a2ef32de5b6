"""Headers of Megatron's `.bin/.idx` and of `tokenizer.json`, read in part and without numpy, and
the manifest next to `.bin/.idx`.

`.idx`, little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 number of
sequences, uint64 number of document indices (documents + 1), int32 length of each sequence in
tokens, int64 pointer to each sequence in bytes, int64 document indices (a document is the
sequences from one index to the next). `.bin` is the tokens of all sequences, nothing else.

`data tokenize`, and every command that changes a corpus, writes `PREFIX.manifest.json`: the
sources of the corpus, and the hashes of its files. A digest over its canonical form reveals every
changed byte.
"""

from __future__ import annotations

import hashlib
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

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.schema.data import DataConfig
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
        """Return the place of a document's first token; for `num_documents`, the stream's end."""
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
            header = read_header(self.idx, self._file.read(HEADER.size), size)
            self.header = header
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
        """Return the place of a document's first token; for `num_documents`, the stream's end."""
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
        """Return the smallest and largest of `count` token ids from a place on; None for none."""
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


FORMAT = 1
SUFFIX = ".manifest.json"
MAX_BYTES = 256 * MIB
# The size up to which `check` reads a manifest, in a fraction of a second.
READ_BYTES = 16 * MIB
COUNTS = ("documents", "sequences", "tokens", "largest_id", "vocab_size")
FILES = (".bin", ".idx")


@dataclass(frozen=True)
class Manifest:
    """The facts of a corpus; see the module."""

    path: Path
    body: dict[str, Any]

    def count(self, name: str) -> int:
        """Return one of COUNTS; the largest id of an empty corpus is -1."""
        return int(self.body[name])

    @property
    def eod(self) -> int | None:
        """Return the id at the end of each document; None if there is none."""
        found = self.body["eod"]
        return found if isinstance(found, int) else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return the hash of the tokenizer.json that made the tokens; None for another kind."""
        tokenizer = self.body["tokenizer"]
        return tokenizer["sha256"] if tokenizer.get("kind") == "tokenizer.json" else None

    def bytes_of(self, suffix: str) -> int:
        """Return the size of one of FILES in bytes."""
        return int(self.body["files"][suffix]["bytes"])

    def sha256_of(self, suffix: str) -> str:
        """Return the hash of one of FILES."""
        return str(self.body["files"][suffix]["sha256"])

    def sizes_differ(self, prefix: Path, *, remote: bool = False) -> str:
        """Return the first file of the corpus whose size differs from the manifest; empty if none
        does.

        It reads no contents. Of a `remote` corpus it compares the local index; opening compares the
        `.bin`.

        Raises:
            OSError: a file is missing.
        """
        for suffix in (".idx",) if remote else FILES:
            file = prefix.with_name(prefix.name + suffix)
            if (size := file.stat().st_size) != self.bytes_of(suffix):
                return f"{file}: {size} bytes, and {self.path.name} records {self.bytes_of(suffix)}"
        return ""


def path_of(prefix: Path) -> Path:
    """Return the path of a corpus's manifest."""
    return prefix.with_name(prefix.name + SUFFIX)


def dump(body: dict[str, Any]) -> bytes:
    """Return the text of a manifest; `body` lacks its digest."""
    return _written(body | {"digest": _digest(body)})


def unwatched(data: DataConfig) -> str:
    """Return a warning about corpora of `data=indexed` without a manifest, else ""."""
    if data.kind != "indexed":
        return ""
    data = data.without_excluded()
    named = (
        *(data.blend or (data.path,)),
        *(data.validation_blend or ()),
        *(data.test_blend or ()),
    )
    bare = [
        name
        for name in named
        if name and "://" not in name and not os.path.lexists(path_of(user_path(name)))
    ]
    if not bare:
        return ""
    more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
    said = f"no manifest next to {bare[0]}{more}: a changed token would stay unnoticed"
    return f"{said}; data verify {bare[0]} write=true makes one"


def read_manifest(prefix: Path, limit: int = MAX_BYTES) -> Manifest | None:
    """Return the manifest of a corpus; None if it is missing or larger than `limit`.

    Raises:
        CorruptData: it was changed after it was written.
        OSError: it cannot be read.
    """
    path = path_of(prefix)
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CorruptData(f"{path}: is no regular file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise CorruptData(f"{path}: {bytes_(size)}; a manifest may have {bytes_(MAX_BYTES)}")
    return None if size > limit else _parsed(path, path.read_bytes())


def _parsed(path: Path, data: bytes) -> Manifest:
    try:
        body = json.loads(data.decode())
        if not isinstance(body, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: no manifest: {str(error)[:200]}") from None
    digest = body.pop("digest", None)
    # The text must be canonical, too: two spellings of one manifest would have one digest.
    if digest != _digest(body) or _written(body | {"digest": digest}) != data:
        raise CorruptData(
            f"{path}: its digest does not match its contents: it was changed, or is incomplete",
            "  fix: copy it again from where the corpus was made, or tokenize again",
        )
    if wrong := _wrong(body):
        raise CorruptData(f"{path}: {wrong}")
    return Manifest(path, body)


def _wrong(body: dict[str, Any]) -> str:
    """Return a message for the first missing or invalid field of a manifest, or ""."""
    if body.get("format") != FORMAT:
        return f"format {str(body.get('format'))[:20]} of the manifest; {FORMAT} is known"
    missing = [
        name for name in COUNTS if not _is_count(body.get(name), -1 if name == "largest_id" else 0)
    ]
    files = body.get("files")
    tokenizer = body.get("tokenizer")
    inputs = body.get("inputs")
    if missing:
        return f"{missing[0]} is missing"
    if not isinstance(files, dict) or not all(_is_file(files.get(suffix)) for suffix in FILES):
        return "the hashes of .bin and .idx are missing"
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("sha256"), str):
        return "the tokenizer is missing"
    if not isinstance(inputs, list) or not all(map(_is_input, inputs)):
        return "the inputs are missing"
    if "eod" in body and (body["eod"] is None or _is_count(body["eod"])):
        return ""
    return "eod is missing"


def _is_count(held: Any, least: int = 0) -> bool:
    return type(held) is int and least <= held < 1 << 63


def _is_file(held: Any) -> bool:
    return (
        isinstance(held, dict)
        and _is_count(held.get("bytes"))
        and isinstance(held.get("sha256"), str)
    )


def _is_input(held: Any) -> bool:
    """Return whether an entry is a valid input: a file with counts."""
    if not isinstance(held, dict) or not isinstance(held.get("file"), str):
        return False
    return all(_is_count(value) for name, value in held.items() if name != "file")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(strict_json.dumps(body, sort_keys=True).encode()).hexdigest()


def _written(body: dict[str, Any]) -> bytes:
    return (strict_json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
