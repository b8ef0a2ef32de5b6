"""Inspection and verification of a corpus: counts, lengths, the text of a document, hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable
from mtrain.config.disk.token_files import FORMAT, Manifest, dump, path_of
from mtrain.data.preprocess.encoder import Encoder
from mtrain.data.store.indexed import IndexedDataset
from mtrain.errors import ConfigError, CorruptData

# Tokens of a document that are shown
SHOWN = 4096
BETWEEN = "|"


def document_lengths(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    """Yield the lengths of documents in tokens, a million documents at a time."""
    step = 1 << 20
    for first in range(0, dataset.num_documents, step):
        stop = min(first + step, dataset.num_documents)
        ends = dataset.document_indices[first : stop + 1]
        low = int(ends[0])
        high = int(ends[-1])
        sums = np.concatenate([[0], np.cumsum(dataset.lengths[low:high], dtype=np.int64)])
        yield np.diff(sums[ends - low])


def histogram(dataset: IndexedDataset) -> list[tuple[int, int, int]]:
    """Return (first length, last length, documents) of the lengths 0, 1, 2 to 3, 4 to 7, ..."""
    counts = np.zeros(64, np.int64)
    for lengths in document_lengths(dataset):
        # the exponent of a float is the number of bits of its integer part
        places = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0)
        counts += np.bincount(places, minlength=64)
    used = np.flatnonzero(counts)
    bounds = [(0, 0), *((1 << i, (2 << i) - 1) for i in range(63))]
    if len(used):
        return [(*bounds[i], int(counts[i])) for i in range(int(used[0]), int(used[-1]) + 1)]
    return []


def document(dataset: IndexedDataset, number: int) -> list[np.ndarray]:
    """Return the sequences of a document.

    Raises:
        ConfigError: there is no document of the number.
    """
    if not 0 <= number < dataset.num_documents:
        if dataset.num_documents:
            rule = (
                f"cannot be shown because the corpus has documents 0 to {dataset.num_documents - 1}"
            )
        else:
            rule = "cannot be shown because the corpus has no document"
        raise ConfigError.of("MT003", "doc", number, rule, "doc=0", "command line")
    first, stop = (int(i) for i in dataset.document_indices[number : number + 2])
    return [dataset[i] for i in range(first, stop)]


def tokens_as_text(ids: Sequence[int], encoder: Encoder | None) -> str:
    """Return ids, or their texts with a mark between tokens.

    A character of several tokens is shown after the last of them.
    """
    shown = list(map(int, ids[:SHOWN]))
    more = f" ... and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    if encoder is None:
        return " ".join(map(str, shown)) + more
    out = list[str]()
    held = list[int]()
    for number in shown:
        held.append(number)
        text = encoder.decode(held)
        # UTF-8 has at most four bytes for a character: with more, the text itself is damaged
        if not text.endswith("\ufffd") or len(held) > 4:
            out.append(text)
            held = []
    if held:
        out.append(encoder.decode(held))
    return BETWEEN.join(out) + more


def described(dataset: IndexedDataset) -> dict[str, Any]:
    """Return counts and lengths, ready for JSON."""
    longest = max(
        (int(lengths.max()) for lengths in document_lengths(dataset) if len(lengths)), default=0
    )
    return {
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": dataset.num_tokens * dataset.dtype.itemsize,
        "longest_document": longest,
        "lengths": [
            {"from": low, "to": high, "documents": many} for low, high, many in histogram(dataset)
        ],
    }


# Tokens that are compared at once
BLOCK = 1 << 24


@dataclass(frozen=True)
class Scanned:
    """The result of a scan of all tokens."""

    largest: int
    """The largest id, -1 without tokens."""
    smallest: int
    sha256: str
    """The digest of the `.bin`."""


def verify(
    dataset: IndexedDataset, held: Manifest | None, vocab_size: int | None, *, hashed: bool
) -> Scanned:
    """Check every byte of a corpus; without `hashed` it needs no manifest.

    Raises:
        ConfigError: there is no manifest.
        CorruptData: a file differs from the manifest, does not add up, or has an id outside of the
            vocabulary.
    """
    if held is None and hashed:
        rule = "cannot be compared because the corpus has no manifest with the hashes of its bytes"
        fix = "manifest=false to check the rest"
        raise ConfigError.of("MT623", "manifest", str(dataset.prefix), rule, fix, "command line")
    if held is not None:
        _counts(held, dataset)
    scanned = scan(dataset, vocab_size if held is None else held.count("vocab_size"))
    if held is not None:
        _hashes(held, dataset, scanned)
    if held is not None and vocab_size is not None and scanned.largest >= vocab_size:
        _outside(dataset, vocab_size)
    return scanned


def write_manifest(dataset: IndexedDataset, scanned: Scanned, encoder: Encoder | None) -> None:
    """Write a manifest for a corpus of another tool: its counts and hashes as the scan found them.

    `encoder` is the tokenizer that made the tokens, None if that is unknown.

    Raises:
        CorruptData: the tokenizer does not have an id of the corpus.
    """
    if encoder is not None and scanned.largest >= encoder.vocab_size:
        _outside(dataset, encoder.vocab_size)
    with open(dataset.idx, "rb") as file:
        index = hashlib.file_digest(file, "sha256").hexdigest()
    spec = None if encoder is None else encoder.spec
    files = [] if spec is None else [Path(file).name for file in spec.files]
    if spec is not None:
        tokenizer = {"kind": spec.kind, "sha256": spec.sha256}
    else:
        tokenizer = {"kind": "unknown", "sha256": ""}
    hashes = {".bin": (Path(dataset.bin), scanned.sha256), ".idx": (dataset.idx, index)}
    body: dict[str, Any] = {
        "format": FORMAT,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "rejected": 0,
        "largest_id": scanned.largest,
        "vocab_size": scanned.largest + 1 if encoder is None else encoder.vocab_size,
        "unk": None,
        "eod": None,
        "dtype": dataset.dtype.name,
        "tokenizer": {**tokenizer, "files": files},
        "inputs": [],
        "files": {
            name: {"bytes": path.stat().st_size, "sha256": sha}
            for name, (path, sha) in hashes.items()
        },
    }
    durable.write(path_of(dataset.prefix), dump(body))


def _counts(held: Manifest, dataset: IndexedDataset) -> None:
    counts = {
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
    }
    for name, number in counts.items():
        if held.count(name) != number:
            raise CorruptData(
                f"{dataset.idx}: {number} {name}, and {held.path.name} says {held.count(name)}"
            )
    if held.body.get("dtype") != dataset.dtype.name:
        recorded = str(held.body.get("dtype"))[:20]
        raise CorruptData(
            f"{dataset.idx}: tokens are {dataset.dtype.name}, and {held.path.name} says {recorded}"
        )


def _hashes(held: Manifest, dataset: IndexedDataset, scanned: Scanned) -> None:
    with open(dataset.idx, "rb") as file:
        index = hashlib.file_digest(file, "sha256").hexdigest()
    for path, suffix, found in (
        (dataset.idx, ".idx", index),
        (dataset.bin, ".bin", scanned.sha256),
    ):
        if found != held.sha256_of(suffix):
            raise CorruptData(f"{path}: sha256 is {found}, was written as {held.sha256_of(suffix)}")
    if held.count("largest_id") != scanned.largest:
        raise CorruptData(
            f"{dataset.bin}: ids to {scanned.largest}, and its manifest says"
            f" {held.count('largest_id')}"
        )


def blocks(dataset: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all tokens, as (place of the first, tokens)."""
    for first in range(0, dataset.num_tokens, BLOCK):
        yield first, dataset.tokens[first : first + BLOCK]


def scan(dataset: IndexedDataset, vocab_size: int | None = None) -> Scanned:
    """Return the smallest and largest id and the hash of the tokens.

    Raises:
        CorruptData: an id is negative or outside of the vocabulary, with its document.
    """
    digest = hashlib.sha256()
    largest = -1
    smallest = 0
    for first, tokens in blocks(dataset):
        digest.update(memoryview(tokens).cast("B"))  # type: ignore[arg-type]
        low = int(tokens.min())
        high = int(tokens.max())
        largest = max(largest, high)
        smallest = min(smallest, low)
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = tokens < 0 if low < 0 else tokens >= (vocab_size or 0)
            _refuse(dataset, first + int(np.argmax(wrong)), vocab_size)
    return Scanned(largest, smallest, digest.hexdigest())


def _outside(dataset: IndexedDataset, vocab_size: int) -> None:
    for first, tokens in blocks(dataset):
        wrong = tokens >= vocab_size
        if wrong.any():
            _refuse(dataset, first + int(np.argmax(wrong)), vocab_size)


def _refuse(dataset: IndexedDataset, place: int, vocab_size: int | None) -> None:
    ids = f"ids are 0 to {vocab_size - 1}" if vocab_size is not None else "ids begin with 0"
    raise CorruptData(
        f"{dataset.bin}: offset {place * dataset.dtype.itemsize}: document"
        f" {dataset.document_at(place)} has the token id {dataset.tokens[place]}; {ids}"
    )
