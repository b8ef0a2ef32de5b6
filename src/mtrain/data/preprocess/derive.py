"""Corpora derived from others: joined, split, sampled, or without duplicates."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable
from mtrain.config.disk import token_files
from mtrain.config.disk.token_files import split_documents
from mtrain.data.preprocess.build import refuse_existing, remove_optional_files
from mtrain.data.preprocess.encoder import library
from mtrain.data.preprocess.journal import disk, finish
from mtrain.data.preprocess.sources import PARTIAL
from mtrain.data.store.indexed import IndexedDataset, write_index
from mtrain.errors import ConfigError, CorruptData

# Manifest fields that a derived corpus inherits
KEPT = ("vocab_size", "unk", "eod", "tokenizer", "document")
BLOCK = 1 << 24


@dataclass(frozen=True)
class OpenCorpus:
    """An open corpus and its manifest, if it has one."""

    dataset: IndexedDataset
    held: token_files.Manifest | None

    @property
    def common(self) -> dict[str, Any]:
        """Return the fields that joined corpora inherit."""
        if self.held is None:
            return {
                "tokenizer": {"kind": "unknown", "sha256": ""},
                "vocab_size": None,
                "unk": None,
                "eod": None,
                "document": None,
            }
        return {name: self.held.body.get(name) for name in KEPT}


def open_prefix(prefix: Path) -> OpenCorpus:
    """Return the corpus of a prefix.

    Raises:
        ConfigError: its files are missing.
        CorruptData: it does not add up, or differs from its manifest.
    """
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix.with_name(prefix.name + suffix)):
            rule = f"cannot be opened because {prefix.parent} has no file {prefix.name}{suffix}"
            fix = "the prefix of a .bin and an .idx"
            raise ConfigError.of("MT602", "prefix", str(prefix), rule, fix)
    held = token_files.read_manifest(prefix)
    dataset = IndexedDataset(prefix)
    if held is not None and (wrong := held.sizes_differ(prefix)):
        raise CorruptData(wrong)
    return OpenCorpus(dataset, held)


def write(
    out: Path,
    parts: Sequence[tuple[OpenCorpus, np.ndarray]],
    how: Mapping[str, Any],
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write a corpus of documents, given by their rising numbers, and return its manifest.

    Raises:
        ConfigError: the corpora have different tokenizers, or files of this name exist.
        BadEnvironment: the disk fails.
    """
    refuse_existing(out, overwrite)
    common = _common(parts)
    dtype = parts[0][0].dataset.dtype
    folder = out.with_name(out.name + PARTIAL)
    with disk(folder):
        if folder.exists():
            rule = "cannot be written because a killed run left it, or another process works there"
            fix = "finish that run, or remove the folder"
            raise ConfigError.of("MT622", "out", str(folder), rule, fix, "command line")
        folder.mkdir(parents=True)
        try:
            digest, counts, largest, inputs = _tokens(folder, parts)
            index = _index(folder, dtype)
            body = {
                "format": token_files.FORMAT,
                **counts,
                "rejected": 0,
                "largest_id": largest,
                "dtype": dtype.name,
                **common,
                # unknown without a manifest: then the smallest vocabulary that holds the ids
                "vocab_size": common["vocab_size"] or largest + 1,
                "made": dict(how),
                "inputs": inputs,
                "files": {
                    ".bin": {"bytes": (folder / "bin").stat().st_size, "sha256": digest},
                    ".idx": {"bytes": (folder / "idx").stat().st_size, "sha256": index},
                },
            }
            (folder / "manifest").write_bytes(token_files.dump(body))
            for name in ("bin", "idx", "manifest"):
                durable.sync(folder / name)
            endings = (("bin", ".bin"), ("idx", ".idx"), ("manifest", token_files.SUFFIX))
            remove_optional_files(out)
            finish(
                [(folder / name, out.with_name(out.name + end)) for name, end in endings],
                durable.sync,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return body


def _common(parts: Sequence[tuple[OpenCorpus, np.ndarray]]) -> dict[str, Any]:
    # tokens of two tokenizers in one file would be valid ids and wrong text
    first, *rest = [one for one, _ in parts]
    for one in rest:
        names = [name for name in ("tokenizer", "eod") if one.common[name] != first.common[name]]
        if one.dataset.dtype != first.dataset.dtype:
            names.append(f"dtype ({first.dataset.dtype.name} and {one.dataset.dtype.name})")
        if names:
            rule = (
                f"cannot be joined because its {' and '.join(names)} differs from"
                f" {first.dataset.prefix}"
            )
            fix = "tokenize both with the same tokenizer, eod= and dtype="
            raise ConfigError.of(
                "MT620", "prefix", str(one.dataset.prefix), rule, fix, "command line"
            )
    return first.common


def runs(documents: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive numbers among rising ones, as (first, stop)."""
    if not len(documents):
        return
    breaks = np.flatnonzero(np.diff(documents) != 1) + 1
    for part in zip([0, *breaks], [*breaks, len(documents)], strict=True):
        yield int(documents[part[0]]), int(documents[part[1] - 1]) + 1


def _tokens(
    folder: Path, parts: Iterable[tuple[OpenCorpus, np.ndarray]]
) -> tuple[str, dict[str, int], int, list[dict[str, Any]]]:
    digest = hashlib.sha256()
    largest = -1
    inputs = []
    counts = {"documents": 0, "sequences": 0, "tokens": 0}
    with (
        open(folder / "bin", "wb") as tokens,
        open(folder / "lengths", "wb") as lengths,
        open(folder / "ends", "wb") as ends,
    ):
        ends.write(np.zeros(1, "<i8").tobytes())
        for one, documents in parts:
            before = dict(counts)
            # neighbours are copied together, as most documents of a split are
            for first, stop in runs(documents):
                dataset = one.dataset
                start = dataset.document_start(first)
                end = dataset.document_start(stop)
                for place in range(start, end, BLOCK):
                    block = dataset.tokens[place : min(place + BLOCK, end)]
                    largest = max(largest, int(block.max()))
                    data = memoryview(block).cast("B")  # type: ignore[arg-type]
                    digest.update(data)
                    tokens.write(data)
                low, high = (int(dataset.document_indices[i]) for i in (first, stop))
                lengths.write(dataset.lengths[low:high].tobytes())
                # indices count sequences from the beginning of the new corpus
                indices = dataset.document_indices[first + 1 : stop + 1] - low
                ends.write((indices + counts["sequences"]).tobytes())
                counts["documents"] += stop - first
                counts["sequences"] += high - low
                counts["tokens"] += end - start
            made = {name: counts[name] - before[name] for name in counts}
            inputs.append({"file": str(one.dataset.prefix), **made})
    return digest.hexdigest(), counts, largest, inputs


def _index(folder: Path, dtype: np.dtype) -> str:
    lengths: np.ndarray = np.empty(0, "<i4")
    if (folder / "lengths").stat().st_size:  # an empty file cannot be mapped
        lengths = np.memmap(folder / "lengths", "<i4", "r")
    write_index(folder / "idx", lengths, dtype, np.memmap(folder / "ends", "<i8", "r"))
    with open(folder / "idx", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def all_documents(one: OpenCorpus) -> np.ndarray:
    """Return the numbers of all documents."""
    return np.arange(one.dataset.num_documents)


def documents_of_shares(
    one: OpenCorpus, shares: Sequence[float], seed: int | None
) -> list[np.ndarray]:
    """Return the documents of each share.

    Without a seed, a share is consecutive documents and counts tokens; with one, its documents are
    drawn, and it counts documents.

    Raises:
        ConfigError: a share would have no document.
    """
    if seed is None:
        out = [np.arange(part.start, part.stop) for part in split_documents(one.dataset, shares)]
    else:
        count = one.dataset.num_documents
        places = np.round(np.cumsum([0.0, *shares]) / sum(shares) * count).astype(int)
        order = np.random.default_rng(seed).permutation(count)
        out = [np.sort(order[a:b]) for a, b in pairwise(places)]
    empty = [i for i, part in enumerate(out) if not len(part) and shares[i] > 0]
    if empty:
        rule = (
            f"cannot be given because share {empty[0]} of {one.dataset.num_documents} documents"
            " would have no document"
        )
        raise ConfigError.of(
            "MT604", "shares", list(shares), rule, "fewer or other shares", "command line"
        )
    return out


def draw_documents(
    one: OpenCorpus, seed: int, documents: int | None, tokens: int | None
) -> np.ndarray:
    """Return a random sample of `documents` documents, or of at most `tokens` tokens, in order.

    A document that exceeds the remaining tokens is skipped and the next ones are tried, so that no
    unused document would fit at the end.
    """
    count = one.dataset.num_documents
    # sorted: the sample keeps the order of the corpus, and is copied in few runs
    order = np.random.default_rng(seed).permutation(count)
    if documents is not None:
        return np.sort(order[:documents])
    lengths = document_lengths(one)
    left = tokens or 0
    taken = list[np.ndarray]()
    while len(order):
        sums = np.cumsum(lengths[order])
        many = int(np.searchsorted(sums, left, side="right"))
        if many:
            taken.append(order[:many])
            left -= int(sums[many - 1])
        rest = order[many:]
        order = rest[(lengths[rest] <= left) & (lengths[rest] > 0)]
    return np.sort(np.concatenate(taken)) if taken else order


def document_lengths(one: OpenCorpus) -> np.ndarray:
    """Return the length of each document; int64 [documents]."""
    starts = np.concatenate(
        [one.dataset.pointers // one.dataset.dtype.itemsize, [one.dataset.num_tokens]]
    )
    return np.diff(starts[one.dataset.document_indices])


# (document to remove, earlier document that it repeats)
Duplicates = list[tuple[int, int]]


def _documents(dataset: IndexedDataset, end: int | None) -> Iterator[np.ndarray]:
    """Yield tokens of each document, without the token that ends it."""
    for i in range(dataset.num_documents):
        tokens = dataset.tokens[dataset.document_start(i) : dataset.document_start(i + 1)]
        if end is not None and len(tokens) and tokens[-1] == end:
            tokens = tokens[:-1]
        yield tokens


def exact_duplicates(dataset: IndexedDataset, end: int | None) -> Duplicates:
    """Return documents with the tokens of an earlier one."""
    seen = dict[bytes, int]()
    out = Duplicates()
    for i, tokens in enumerate(_documents(dataset, end)):
        # 16 bytes for a document: no two of a trillion documents have the same by chance
        first = seen.setdefault(hashlib.blake2b(tokens.tobytes(), digest_size=16).digest(), i)
        if first != i:
            out.append((i, first))
    return out


def near_duplicates(
    dataset: IndexedDataset, end: int | None, threshold: float, ngram: int, permutations: int
) -> Duplicates:
    """Return the documents whose estimated Jaccard similarity of n-grams with an earlier, remaining
    one is at least `threshold`.

    Raises:
        BadEnvironment: datasketch is not installed.
    """
    sketch = library("datasketch", "dedup", "data dedup method=minhash")
    index = sketch.MinHashLSH(threshold=threshold, num_perm=permutations)
    # the index only finds candidates near the threshold; their estimates are compared with it
    kept = dict[int, object]()
    out = Duplicates()
    for i, tokens in enumerate(_documents(dataset, end)):
        found = sketch.MinHash(num_perm=permutations, seed=1)
        found.update_batch(_shingles(tokens, ngram))
        close = [j for j in index.query(found) if found.jaccard(kept[j]) >= threshold]
        if close:
            out.append((i, min(close)))
        else:
            index.insert(i, found)
            kept[i] = found
    return out


def _shingles(tokens: np.ndarray, ngram: int) -> list[bytes]:
    if len(tokens) <= ngram:
        return [tokens.tobytes()]
    width = np.lib.stride_tricks.sliding_window_view(tokens, ngram)
    # each n-gram as one opaque value, so that numpy finds the distinct ones
    whole = np.ascontiguousarray(width).view(f"V{ngram * tokens.itemsize}").ravel()
    return [one.tobytes() for one in np.unique(whole)]


def remaining_documents(count: int, duplicates: Duplicates) -> np.ndarray:
    """Return the documents that stay."""
    keep = np.ones(count, bool)
    keep[[document for document, _ in duplicates]] = False
    return np.flatnonzero(keep)
