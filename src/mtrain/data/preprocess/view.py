"""A corpus as a person reads it: counts, lengths of documents, and the text of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtrain.data.preprocess.encoders.base import Encoder
from mtrain.data.store.indexed import IndexedDataset
from mtrain.errors import ConfigError, Problem

SHOWN = 4096
"""Tokens of a document that are shown."""
BETWEEN = "|"


def document_lengths(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    """Yield tokens of each document, some documents at a time."""
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
            rule = f"documents are 0 to {dataset.num_documents - 1}"
        else:
            rule = "it has no document"
        raise ConfigError([Problem("MT003", "doc", number, rule, "doc=0", "command line")])
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
