"""Samples of whole documents of `.bin/.idx`, packed by first fit.

Seed and epoch do not change which documents share a sample, only the order of the samples: the
parts of `FittedDocuments` follow each other, and the samples of each part are shuffled. Very many
documents are divided into parts, each with stretches from the whole corpus, and a part is packed
when its first sample is needed: so a corpus of any size opens at once.

A sample reads `seq_length` tokens and predicts as many, so a document of one token more fits. Piece
k of a longer one has the tokens from k * seq_length on: each but the last fills a sample and
predicts the first token of the next one, and the last is packed with other documents. So each token
but the first of its document is predicted once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.config.schema.data import DataConfig
from mtrain.data.chats.samples import KEPT, NOTHING, Sample
from mtrain.data.samples.blend import Blend
from mtrain.data.samples.packing import first_fits
from mtrain.data.samples.permutation import ROUNDS, Permutation, keys
from mtrain.data.samples.token_stream import Samples
from mtrain.data.store.cache import SMALL, Arrays, build_arrays, name_of
from mtrain.errors import ConfigError, CorruptData, Problem

# The fewest tokens of a document that can be learned, as the first one is not predicted
LEAST = 2
# The approximate number of documents of a part
PART = 1 << 20
# The fewest documents of a stretch
STRETCH = 1 << 12
KEPT_PARTS = 4
THREADS = 8
# The entries of `counts`: documents that are cut, their pieces, documents left out as too long,
# documents of fewer than two tokens, and places of samples without a token.
COUNTED = ("cut", "pieces", "dropped", "short", "padding")


@dataclass(frozen=True)
class Fit:
    """The settings that decide which documents share a sample."""

    seq_length: int
    multiple: int = 1
    """Documents are padded to a multiple of this many tokens."""
    window: int = 2048
    long: str = "cut"

    @classmethod
    def of(cls, data: DataConfig) -> Fit:
        """Return the settings of a configuration."""
        return cls(data.length, data.packed_multiple or 1, data.packed_window, data.long_documents)

    def pieces(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of pieces of each document; 0 if it is skipped."""
        pieces = -(-(lengths - 1) // self.seq_length)
        pieces[lengths < LEAST] = 0
        if self.long == "drop":
            pieces[pieces > 1] = 0
        return pieces

    def read(self, lengths: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Return how many tokens of the last piece of each document are read.

        The token after a full sample is only a label.
        """
        return np.where(
            pieces > 0, np.minimum(lengths - (pieces - 1) * self.seq_length, self.seq_length), 0
        )


class FittedDocuments:
    """The documents of a range, packed part by part; several parts are stored in `cache`.

    `dataset` is an `IndexedDataset` or has its interface. Raises ConfigError if documents are
    longer than a sample and `long` refuses that, CorruptData for an index that does not add up.
    """

    def __init__(self, dataset: Any, documents: range, fit: Fit, cache: Path | None) -> None:
        self.dataset = dataset
        self.documents = documents
        self.fit = fit
        self._cache = cache
        # a whole number of windows, so that no window of first fit spans two stretches
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
        # stretches from all over the corpus: neighbouring samples do not come from one place of it
        step = self._step
        firsts = range(every.start + part * step, every.stop, self.parts * step)
        return [range(first, min(first + step, every.stop)) for first in firsts]

    def _part(self, part: int) -> Arrays:
        """Return the samples of a part.

        `fitted`: documents or their last pieces, sample by sample, counted from the start of the
        range. `starts`: the start of each sample in it, and the end. `long`: documents with pieces
        before the last one; `pieces`: the number of such pieces before each of them, and of all.
        `counts`: see `COUNTED`.
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
        """Pack all parts and return the number of samples of each."""
        missing = [part for part in range(self.parts) if part not in self._samples]
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(self._part, missing))
        return [self._samples[part] for part in range(self.parts)]

    def counts(self) -> dict[str, int]:
        """Return documents, samples and `COUNTED` of the parts that are packed so far."""
        parts = sorted(self._samples)
        seen = sum(len(stretch) for part in parts for stretch in self.stretches(part))
        counted = np.sum([self._counts[part] for part in parts], axis=0).tolist()
        found = {"fitted": seen, "samples": sum(self._samples[part] for part in parts)}
        return {**found, **dict(zip(COUNTED, counted, strict=True))}

    def _made(self, what: str, fill: Any) -> Arrays:
        # a corpus of a single part is small enough to be packed again by every process
        if self._cache is None or self.parts == 1:
            return build_arrays(Path(), 0, fill)
        stamp = os.stat(self.dataset.idx)
        every = self.documents
        name = [str(self.dataset.idx.resolve()), stamp.st_size, stamp.st_mtime_ns]
        key = [what, self.parts, *astuple(self.fit), every.start, every.stop, *name]
        return build_arrays(self._cache / f"documents-{name_of(key)}", SMALL + 1, fill)

    def _fill(self, stretches: list[range], array: Any) -> None:
        """Pack some stretches of documents into arrays that `array(name, dtype, length)` makes."""
        fit = self.fit
        numbers = np.concatenate([np.arange(stretch.start, stretch.stop) for stretch in stretches])
        lengths = np.concatenate(
            [np.diff(self.dataset.document_starts(stretch)) for stretch in stretches]
        )
        pieces = fit.pieces(lengths)
        tokens = fit.read(lengths, pieces)
        taken = pieces > 0
        window = _windows(-(-tokens // fit.multiple) * fit.multiple, fit)
        # stable, so that the documents of a sample stay in the order of the corpus
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
                f" data.seq_length {room - 1} has room for; the longest, document {which}, has"
                f" {longest}"
            )
            fix = (
                "data.long_documents=cut, data.long_documents=drop, or"
                f" data.seq_length={longest - 1}"
            )
            raise ConfigError.of("MT641", "data.long_documents", "refuse", rule, fix)

    def _look(self, array: Any) -> None:
        """Store the count of too long documents, and length and number of the longest."""
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
    """Return the sample of each document of the given size; windows do not share samples."""
    groups = -(-len(sizes) // fit.window)
    padded = np.zeros(groups * min(fit.window, len(sizes)), np.int64)
    padded[: len(sizes)] = sizes
    found = first_fits(padded.reshape(groups, -1), fit.seq_length)
    return (found + (int(found.max()) + 1) * np.arange(groups)[:, None]).ravel()[: len(sizes)]


# A part, and a sample of it
Place = tuple[int, int]


class WholeDocuments(Samples):
    """The samples of a range of whole documents, in one epoch after another.

    `len` is the number of one epoch, and packs all parts. Raises ConfigError if no document of the
    range has two tokens or can be used, CorruptData for an index that does not add up.
    """

    def __init__(
        self,
        dataset: Any,
        documents: range,
        fit: Fit,
        seed: int,
        vocab_size: int,
        name: str,
        cache: Path | None = None,
    ) -> None:
        self.seed = seed
        self.fit = fit
        self.multiple = fit.multiple
        first = dataset.document_start(documents.start)
        end = dataset.document_start(documents.stop)
        self._take(dataset, documents, first, end, fit.seq_length, vocab_size, name, need=LEAST)
        self.fitted = FittedDocuments(dataset, documents, fit, cache)
        self._count = 0
        """Samples of an epoch; 0 while unknown."""
        if self.fitted.parts == 1:
            self._count = self.fitted.samples(0)
        self._parts = functools.lru_cache(maxsize=4)(self._parts_of)
        self._order = functools.lru_cache(maxsize=4)(self._permuted)
        self._sample = functools.lru_cache(maxsize=KEPT)(self._made)
        # a split without any sample is refused when it is opened, and not in the first step
        self.find(0)

    def __len__(self) -> int:
        self._count = self._count or sum(self.fitted.every())
        if not self._count:
            raise ConfigError([self._none_is_read()])
        return self._count

    def _none_is_read(self) -> Problem:
        held = len(self.documents)
        s = self.seq_length
        most = f" to {s + 1}" if self.fit.long == "drop" else " or more"
        size = f"{LEAST}{most} tokens"
        rule = f"the {self.name} split has {held} documents, and none of them has {size}"
        fix = f"a larger share for {self.name} in data.split, or a larger data.seq_length"
        return Problem("MT605", "data.seq_length", s, rule, fix)

    def _parts_of(self, epoch: int) -> list[int]:
        """Return the parts in the order of an epoch."""
        count = self.fitted.parts
        order = Permutation(count, keys(self.seed, epoch, f"parts {self.name}", ROUNDS))
        return order(np.arange(count)).tolist()

    def _permuted(self, epoch: int, part: int) -> Permutation:
        words = keys(self.seed, epoch, f"documents {self.name} {part}", ROUNDS)
        return Permutation(self.fitted.samples(part), words)

    def find(self, number: int) -> Place:
        """Return the place of a sample number.

        In the first epoch, this packs only the parts before it.
        """
        epoch = 0
        rest = int(number)
        if self._count:
            epoch, rest = divmod(rest, self._count)
        for part in self._parts(epoch):
            held = self.fitted.samples(part)
            if rest < held:
                return part, int(self._order(epoch, part)(np.array([rest], np.int64))[0])
            rest -= held
        len(self)  # packs all parts, or raises because none has a sample
        return self.find(number)

    def reaches(self, number: int) -> bool:
        """Return whether a sample number is in the first epoch, packing only the parts up to it."""
        self.find(number)
        return not self._count or number < self._count

    def sample(self, number: int) -> Sample:
        """Return the sample of a number.

        Raises CorruptData for an id outside the vocabulary, and for an index that does not add up.
        """
        return self._sample(self.find(number))

    def read(self, place: Place) -> list[tuple[int, int, int]]:
        """Return the documents of a sample, each with first token and end, label included."""
        part, row = place
        s = self.seq_length
        base = self.documents.start
        found = self.fitted.part(part)
        if (piece := row - (len(found["starts"]) - 1)) >= 0:
            which = int(np.searchsorted(found["pieces"], piece, side="right")) - 1
            first = (piece - int(found["pieces"][which])) * s
            return [(base + int(found["long"][which]), first, first + s + 1)]
        out = []
        for document in (
            found["fitted"][found["starts"][row] : found["starts"][row + 1]]
            .astype(np.int64)
            .tolist()
        ):
            length = self._length(base + document)
            out.append((base + document, max(0, -(-(length - 1) // s) - 1) * s, length))
        return out

    def _length(self, document: int) -> int:
        return self.dataset.document_start(document + 1) - self.dataset.document_start(document)

    def _made(self, place: Place) -> Sample:
        s = self.seq_length
        at = 0
        tokens = np.full(s + 1, NOTHING, np.int64)
        learned = np.zeros(s + 1, np.bool_)
        starts = []
        those = self.read(place)
        for document, first, stop in those:
            start = self.dataset.document_start(document) + first
            count = stop - first
            # packed arrays may come from the cache, and the index may have been replaced since
            if not LEAST <= count <= s + 1 - at:
                raise CorruptData(
                    f"{self.dataset.idx}: the length of document {document} changed since it was"
                    " packed: write the index again, or empty data.cache_dir"
                )
            self.dataset.expect([start], count)
            ids = np.asarray(self.dataset.tokens[start : start + count]).astype(np.int64)
            if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
                bad = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
                raise self._outside(start + bad, f"a {self.name} sample")
            tokens[at : at + count] = ids
            learned[at + 1 : at + count] = True
            starts.append(at)
            at += -(-min(count, s) // self.multiple) * self.multiple
        if at < s:
            starts.append(at)
        return Sample(tokens, learned, tuple(starts), tuple(document for document, _, _ in those))

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: token ids, `NOTHING` for padding.

        Raises CorruptData as `sample` does.
        """
        self.dataset.check_next()
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return the documents of a sample, with the tokens of cut ones."""
        names = []
        for document, first, stop in self.read(self.find(number)):
            cut = first or self._length(document) > stop
            names.append(f"{document} (tokens {first} to {stop - 1})" if cut else str(document))
        return f"{self.dataset.prefix}: document{'s' * (len(names) > 1)} {', '.join(names)}"

    def describe(self) -> dict[str, int]:
        """Return the numbers of documents and tokens, and the counts of the packed parts."""
        return {"documents": len(self.documents), "tokens": self.num_tokens, **self.fitted.counts()}


class BlendOfDocuments(Blend):
    """A blend whose samples are packed whole documents."""

    parts: list[WholeDocuments]  # type: ignore[assignment]

    @property
    def multiple(self) -> int:
        """Return the multiple of tokens to which documents are padded."""
        return self.parts[0].multiple

    def sample(self, number: int) -> Sample:
        """Return the sample of a number; raise CorruptData as its part does."""
        part, index = self.places([number])
        return self.parts[int(part[0])].sample(int(index[0]))

    def place(self, number: int) -> str:
        """Return the corpus of a sample and its documents."""
        part, index = self.places([number])
        return self.parts[int(part[0])].place(int(index[0]))


def packing_remarks(source: WholeDocuments | BlendOfDocuments) -> list[str]:
    """Return remarks on the padding of a split's samples, and on cut and skipped documents."""
    counts = source.describe()
    s = source.seq_length
    long = f"documents of more than data.seq_length + 1 = {s + 1} tokens"
    packed = f"data: {counts['documents']} documents of {source.name}"
    if counts["fitted"] < counts["documents"]:
        packed += f"; the {counts['fitted']} that are packed first are in"
    else:
        packed += " are in"
    full = 1 - counts["padding"] / (counts["samples"] * s)
    remarks = [f"{packed} {counts['samples']} samples of {s} tokens, {full:.2%} full"]
    if counts["cut"]:
        remarks.append(f"data: {counts['cut']} {long} are cut into {counts['pieces']} pieces")
    if counts["dropped"]:
        remarks.append(f"data: {counts['dropped']} {long} are left out (data.long_documents=drop)")
    if counts["short"]:
        remarks.append(
            f"data: {counts['short']} documents of fewer than {LEAST} tokens are left out"
        )
    return remarks
