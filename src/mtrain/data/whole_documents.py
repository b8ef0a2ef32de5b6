"""Samples of whole documents of `.bin/.idx`, put side by side by first fit.

Which documents stand together depends neither on seed nor epoch; the order in which their samples
come does. In it the parts of `FittedDocuments` follow each other, and the samples of each are
shuffled.

A sample reads `seq_length` tokens and predicts as many, so a document of one token more fits. Of a
longer one, the piece number k has the tokens from k * seq_length on: each but the last fills a
sample and predicts the first token of the next one, and the last is put beside documents. So each
token but the first of its document is predicted once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.data.blend import Blend
from mtrain.data.chat_samples import KEPT, NOTHING, Sample
from mtrain.data.document_fit import LEAST, Fit, FittedDocuments
from mtrain.data.permute import ROUNDS, Permutation, keys
from mtrain.data.samples import Samples
from mtrain.errors import ConfigError, CorruptData, Problem

Place = tuple[int, int]
"""A part, and a sample of it."""


class WholeDocuments(Samples):
    """The samples of a range of documents, each read whole; `len` is the number per epoch, and
    sample numbers go on from there.

    `len` of several parts fits all of them. Raises ConfigError where no document of the range has
    two tokens, or none is read, CorruptData for an index that does not add up.
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
        self._count = self.fitted.samples(0) if self.fitted.parts == 1 else 0
        """Samples of an epoch; 0: not known yet."""
        self._parts = functools.lru_cache(maxsize=4)(self._parts_of)
        self._order = functools.lru_cache(maxsize=4)(self._permuted)
        self._sample = functools.lru_cache(maxsize=KEPT)(self._made)
        self.find(0)

    def __len__(self) -> int:
        self._count = self._count or sum(self.fitted.every())
        if not self._count:
            raise ConfigError([self._none_is_read()])
        return self._count

    def _none_is_read(self) -> Problem:
        held = len(self.documents)
        s = self.seq_length
        rule = f"the {self.name} split has {held} documents, of which none has {LEAST}"
        rule += f" to {s + 1} tokens" if self.fit.long == "drop" else " tokens or more"
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
        """Where the sample of a number is.

        Of the first epoch, the parts before it are fitted alone.
        """
        epoch, rest = divmod(int(number), self._count) if self._count else (0, int(number))
        for part in self._parts(epoch):
            held = self.fitted.samples(part)
            if rest < held:
                return part, int(self._order(epoch, part)(np.array([rest], np.int64))[0])
            rest -= held
        len(self)  # all parts are fitted now, or there is nothing in them
        return self.find(number)

    def reaches(self, number: int) -> bool:
        """Return whether the sample of a number is in the first epoch.

        Only the parts up to it are fitted.
        """
        self.find(number)
        return not self._count or number < self._count

    def sample(self, number: int) -> Sample:
        """Return the sample of a number.

        Raises CorruptData for an id outside of the vocabulary, and for an index that does not add
        up.
        """
        return self._sample(self.find(number))

    def read(self, place: Place) -> list[tuple[int, int, int]]:
        """Return documents of a sample, each with its first token that is read and the end of
        those, label included.
        """
        (part, row), s, base = place, self.seq_length, self.documents.start
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
            if not LEAST <= count <= s + 1 - at:
                said = (
                    f"document {document} has other than the tokens that were put into samples"
                    " before"
                )
                raise CorruptData(
                    f"{self.dataset.idx}: {said}: write the index again, or empty data.cache_dir"
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
        """Return int64 [n, seq_length + 1]: token ids, `NOTHING` where a sample is padded.

        Raises CorruptData as `sample` does.
        """
        self.dataset.look_on()
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return the documents of a sample, and which tokens of those that are cut."""
        said = []
        for document, first, stop in self.read(self.find(number)):
            cut = first or self._length(document) > stop
            said.append(f"{document} (tokens {first} to {stop - 1})" if cut else str(document))
        return f"{self.dataset.prefix}: document{'s' * (len(said) > 1)} {', '.join(said)}"

    def describe(self) -> dict[str, int]:
        """Counts: documents, tokens, and what `FittedDocuments.counts` says of those that are
        fitted.
        """
        return {"documents": len(self.documents), "tokens": self.num_tokens, **self.fitted.counts()}


class BlendOfDocuments(Blend):
    """A blend whose samples are documents side by side."""

    parts: list[WholeDocuments]  # type: ignore[assignment]

    @property
    def multiple(self) -> int:
        """Return documents are padded to a multiple of this many tokens."""
        return self.parts[0].multiple

    def sample(self, number: int) -> Sample:
        """Return the sample of a number. Raises CorruptData as that of its part does."""
        part, index = self.places([number])
        return self.parts[int(part[0])].sample(int(index[0]))

    def place(self, number: int) -> str:
        """Return the corpus of a sample and its documents."""
        part, index = self.places([number])
        return self.parts[int(part[0])].place(int(index[0]))


def remarks_of(source: WholeDocuments | BlendOfDocuments) -> list[str]:
    """How full the samples of a split are, and what of its documents is cut or left out."""
    counts = source.describe()
    s = source.seq_length
    more = f"documents of more than data.seq_length + 1 = {s + 1} tokens"
    said = f"data: {counts['documents']} documents of {source.name}"
    some = counts["fitted"] < counts["documents"]
    said += f"; the {counts['fitted']} that are fitted first stand in" if some else " stand in"
    full = 1 - counts["padding"] / (counts["samples"] * s)
    found = [f"{said} {counts['samples']} samples of {s} tokens, {full:.2%} full"]
    if counts["cut"]:
        found.append(f"data: {counts['cut']} {more} are cut into {counts['pieces']} pieces")
    if counts["dropped"]:
        found.append(f"data: {counts['dropped']} {more} are left out (data.long_documents=drop)")
    if counts["short"]:
        found.append(f"data: {counts['short']} documents of fewer than {LEAST} tokens are left out")
    return found
