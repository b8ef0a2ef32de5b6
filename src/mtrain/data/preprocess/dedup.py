"""Duplicate documents: with equal tokens, or nearly equal ones by MinHash of datasketch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain

import numpy as np

from mtrain.data.preprocess.encoders.base import library
from mtrain.data.store.indexed import IndexedDataset

Duplicates = list[tuple[int, int]]
"""(document to remove, earlier document that it repeats)."""


def _documents(dataset: IndexedDataset, end: int | None) -> Iterator[np.ndarray]:
    """Yield tokens of each document, without the token that ends it."""
    for i in range(dataset.num_documents):
        tokens = dataset.tokens[dataset.document_start(i) : dataset.document_start(i + 1)]
        yield tokens[:-1] if end is not None and len(tokens) and tokens[-1] == end else tokens


def exact_duplicates(dataset: IndexedDataset, end: int | None) -> Duplicates:
    """Return documents with the tokens of an earlier one."""
    seen = dict[bytes, int]()
    out = Duplicates()
    for i, tokens in enumerate(_documents(dataset, end)):
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
    whole = np.ascontiguousarray(width).view(f"V{ngram * tokens.itemsize}").ravel()
    return [one.tobytes() for one in np.unique(whole)]


def remaining_documents(count: int, twice: Duplicates) -> np.ndarray:
    """Return the documents that stay."""
    keep = np.ones(count, bool)
    keep[list(chain(i for i, _ in twice))] = False
    return np.flatnonzero(keep)
