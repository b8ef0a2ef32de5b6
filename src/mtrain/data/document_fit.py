"""Which whole documents of a corpus stand together in a sample: first fit among some that follow
each other.

Where there are very many documents they are dealt out into parts, each with stretches of documents
from the whole of the corpus, and a part is fitted when its first sample is asked for: so a corpus
of any size is read at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import strict_json
from mtrain.config.schema.data import DataConfig
from mtrain.data.first_fit import first_fits
from mtrain.data.orders import SMALL, Arrays, made_once
from mtrain.errors import ConfigError, Problem

LEAST = 2
"""Tokens of a document of which something is learned: its first one follows nothing."""
PART = 1 << 20
"""Documents of a part, about."""
STRETCH = 1 << 12
"""Documents of a stretch, at least."""
KEPT_PARTS = 4
THREADS = 8
COUNTED = ("cut", "pieces", "dropped", "short", "padding")
"""What `counts` has: documents that are cut, their pieces, those left out for their length or for
having fewer than two tokens, and places of samples that hold no token.
"""


@dataclass(frozen=True)
class Fit:
    """What decides which documents stand together."""

    seq_length: int
    multiple: int = 1
    """Documents are padded to a multiple of this many tokens."""
    window: int = 2048
    long: str = "cut"

    @classmethod
    def of(cls, data: DataConfig) -> Fit:
        """That of a configuration."""
        return cls(data.length, data.packed_multiple or 1, data.packed_window, data.long_documents)

    def pieces(self, lengths: np.ndarray) -> np.ndarray:
        """In how many pieces each document is read; 0: it is left out."""
        pieces = -(-(lengths - 1) // self.seq_length)
        pieces[lengths < LEAST] = 0
        if self.long == "drop":
            pieces[pieces > 1] = 0
        return pieces

    def read(self, lengths: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Return how many tokens of the last piece of each document are read; the one behind a full
        sample is a label.
        """
        return np.where(
            pieces > 0, np.minimum(lengths - (pieces - 1) * self.seq_length, self.seq_length), 0
        )


class FittedDocuments:
    """The documents of a range, fitted part by part; kept in `cache` where there are several parts,
    and a cache.

    `dataset` is an `IndexedDataset`, or what has documents as one. Raises ConfigError where
    documents are longer than a sample and that is refused, CorruptData for an index that does not
    add up.
    """

    def __init__(self, dataset: Any, documents: range, fit: Fit, cache: Path | None) -> None:
        self.dataset = dataset
        self.documents = documents
        self.fit = fit
        self._cache = cache
        self._step = fit.window * -(-STRETCH // fit.window)
        self.parts = max(1, min(len(documents) // PART, -(-len(documents) // self._step)))
        self._samples: dict[int, int] = {}
        self._counts: dict[int, np.ndarray] = {}
        self.part: Callable[[int], Arrays] = functools.lru_cache(maxsize=KEPT_PARTS)(self._part)
        if fit.long == "refuse":
            self._refuse_long()

    def stretches(self, part: int) -> list[range]:
        """Return the documents of a part."""
        every = self.documents
        if self.parts == 1:
            return [every]
        step = self._step
        firsts = range(every.start + part * step, every.stop, self.parts * step)
        return [range(first, min(first + step, every.stop)) for first in firsts]

    def _part(self, part: int) -> Arrays:
        """Return the samples of a part.

        `fitted`: documents, or last pieces of them, sample by sample, counted from the first of the
        range. `starts`: where each sample begins in it, and the end. `long` and `pieces`: documents
        that have pieces before the last one, and how many such pieces those before each of them
        have; and the end. `counts`: see `COUNTED`.
        """
        found = self._made(f"part {part}", lambda array: self._fill(self.stretches(part), array))
        self._samples[part] = len(found["starts"]) - 1 + int(found["pieces"][-1])
        self._counts[part] = found["counts"]
        return found

    def samples(self, part: int) -> int:
        """Return how many samples a part has."""
        if part not in self._samples:
            self.part(part)
        return self._samples[part]

    def every(self) -> list[int]:
        """Return how many samples each part has: all of them are fitted."""
        missing = [part for part in range(self.parts) if part not in self._samples]
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(self._part, missing))
        return [self._samples[part] for part in range(self.parts)]

    def counts(self) -> dict[str, int]:
        """Return counts of the parts that are fitted: their documents, samples, and those of
        `COUNTED`.
        """
        parts = sorted(self._samples)
        seen = sum(len(stretch) for part in parts for stretch in self.stretches(part))
        counted = np.sum([self._counts[part] for part in parts], axis=0).tolist()
        found = {"fitted": seen, "samples": sum(self._samples[part] for part in parts)}
        return {**found, **dict(zip(COUNTED, counted, strict=True))}

    def _made(self, what: str, fill: Any) -> Arrays:
        if self._cache is None or self.parts == 1:
            return made_once(Path(), 0, fill)
        stamp = os.stat(self.dataset.idx)
        every = self.documents
        name = [str(self.dataset.idx.resolve()), stamp.st_size, stamp.st_mtime_ns]
        key = [what, self.parts, *astuple(self.fit), every.start, every.stop, *name]
        digest = hashlib.sha256(strict_json.dumps(key).encode()).hexdigest()[:16]
        return made_once(self._cache / f"documents-{digest}", SMALL + 1, fill)

    def _fill(self, stretches: list[range], array: Any) -> None:
        """Fit some stretches of documents and fill the arrays; `array(name, dtype, length)` makes
        one.
        """
        fit = self.fit
        numbers = np.concatenate([np.arange(stretch.start, stretch.stop) for stretch in stretches])
        lengths = np.concatenate(
            [np.diff(self.dataset.document_starts(stretch)) for stretch in stretches]
        )
        pieces = fit.pieces(lengths)
        tokens = fit.read(lengths, pieces)
        taken = pieces > 0
        window = _windows(-(-tokens // fit.multiple) * fit.multiple, fit)
        order = np.argsort(window, kind="stable")
        order = order[taken[order]]
        counts = np.bincount(window[taken])
        counts = counts[counts > 0]
        long = np.flatnonzero(pieces > 1)
        numbers -= self.documents.start
        dtype = "<u4" if len(self.documents) < 1 << 32 else "<i8"
        array("fitted", dtype, len(order))[:] = numbers[order]
        array("long", "<i8", len(long))[:] = numbers[long]
        for name, many in (("starts", counts), ("pieces", pieces[long] - 1)):
            np.cumsum(many, out=array(name, "<i8", len(many) + 1)[1:])
        dropped = ((lengths >= LEAST) & ~taken).sum()
        short = (lengths < LEAST).sum()
        padding = len(counts) * fit.seq_length - tokens.sum()
        array("counts", "<i8", len(COUNTED))[:] = [
            len(long),
            pieces[long].sum(),
            dropped,
            short,
            padding,
        ]

    def _refuse_long(self) -> None:
        room = self.fit.seq_length + 1
        many, longest, which = (int(n) for n in self._made("longest", self._look)["counts"])
        if many:
            rule = (
                f"{self.dataset.idx}: {many} documents have more than the {room} tokens that"
                " data.seq_length "
            )
            rule += f"{room - 1} has room for; the longest, document {which}, has {longest}"
            fix = (
                "data.long_documents=cut, data.long_documents=drop, or"
                f" data.seq_length={longest - 1}"
            )
            raise ConfigError([Problem("MT641", "data.long_documents", "refuse", rule, fix)])

    def _look(self, array: Any) -> None:
        """How many documents are longer than a sample, the length of the longest, and
        which it is.
        """
        many = 0
        longest = 0
        which = 0
        for first in range(self.documents.start, self.documents.stop, PART):
            part = range(first, min(first + PART, self.documents.stop))
            lengths = np.diff(self.dataset.document_starts(part))
            many += int((lengths > self.fit.seq_length + 1).sum())
            if lengths.max() > longest:
                longest = int(lengths.max())
                which = first + int(lengths.argmax())
        array("counts", "<i8", 3)[:] = many, longest, which


def _windows(sizes: np.ndarray, fit: Fit) -> np.ndarray:
    """Return the sample of each document of which so many places are taken; those of other windows
    have other numbers.
    """
    groups = -(-len(sizes) // fit.window)
    padded = np.zeros(groups * min(fit.window, len(sizes)), np.int64)
    padded[: len(sizes)] = sizes
    found = first_fits(padded.reshape(groups, -1), fit.seq_length)
    return (found + (int(found.max()) + 1) * np.arange(groups)[:, None]).ravel()[: len(sizes)]
