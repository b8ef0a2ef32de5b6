"""The work of one process: it reads and encodes the documents of a unit, and counts them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtrain.data.preprocess.encoders.base import CODES, Encoder
from mtrain.data.preprocess.encoders.loader import load
from mtrain.data.preprocess.encoders.spec import TokenizerSpec
from mtrain.data.preprocess.inputs.readers import documents, surrogate_fault
from mtrain.data.preprocess.inputs.record import Reading, Rejected
from mtrain.data.preprocess.inputs.sentences import Splitter, splitter
from mtrain.data.preprocess.inputs.sources import Source
from mtrain.data.preprocess.inputs.units import Part, Unit
from mtrain.errors import ConfigError, Problem

COUNTED = (
    "records",
    "documents",
    "empty",
    "sequences",
    "tokens",
    "text_bytes",
    "words",
    "unknown_tokens",
    "unknown_bytes",
)
"""The counts of each file."""
BY = "rejected_by_"
"""Prefix, followed by a key, of the count of records that this key excludes from learning."""


@dataclass(frozen=True)
class Job:
    """The settings of all processes of a run."""

    spec: TokenizerSpec
    reading: Reading
    sources: tuple[Source, ...]
    dtype: str | None = None
    """None for Megatron's choice by the vocabulary."""
    append_eod: bool = True
    language: str | None = None
    """The language whose sentences documents are split into, if any."""
    keep_newlines: bool = False


@dataclass
class Counted:
    """The counts of a part of a file."""

    source: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    rejected: list[Rejected] = field(default_factory=list)

    def reject(self, one: Rejected) -> None:
        """Leave a record out."""
        self.rejected.append(one)
        for key in one.by:
            self.counts[f"{BY}{key}"] = self.counts.get(f"{BY}{key}", 0) + 1


@dataclass
class Result:
    """The encoded documents of a unit."""

    tokens: bytes
    lengths: bytes
    """int32: tokens of each sequence."""
    sequences: bytes
    """int32: sequences of each document."""
    largest: int
    parts: list[Counted]
    crc: int = 0


class Worker:
    """An encoder of the units of a job.

    Raises:
        ConfigError: documents should end with a token that the tokenizer does not have.
        CorruptData: the tokenizer's files are not a tokenizer.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.encoder = load(job.spec)
        self.dtype = dtype_of(self.encoder, job.dtype)
        self._packer = self.encoder.packer(CODES[self.dtype.name])
        self.engine = self._packer.engine
        self.passed_over = self._packer.passed_over
        self._split: Splitter | None = None
        if job.language is not None:
            self._split = splitter(job.language, job.keep_newlines)
        if job.append_eod and self.encoder.eod is None:
            rule = f"documents end with a token, and {job.spec.files[0]} names none for it"
            raise ConfigError(
                [
                    Problem(
                        "MT608", "eod", True, rule, "eod_token=NAME, or eod=false", "command line"
                    )
                ]
            )
        self._eod = np.array([self.encoder.eod], self.dtype).tobytes() if job.append_eod else b""

    def run(self, unit: Unit) -> Result:
        """Return the documents of a unit, encoded."""
        out = _Out()
        for part in unit:
            self._part(part, out)
        tokens = b"".join(out.tokens)
        largest = int(np.frombuffer(tokens, self.dtype).max()) if tokens else -1
        lengths, sequences = (np.array(of, "<i4").tobytes() for of in (out.lengths, out.sequences))
        return Result(tokens, lengths, sequences, largest, out.parts, zlib.crc32(tokens))

    def _part(self, part: Part, out: _Out) -> None:
        counted = Counted(part.source)
        out.parts.append(counted)
        texts = list[list[str]]()
        size = 0
        for number, found in documents(part, self.job.sources[part.source], self.job.reading):
            counted.counts["records"] = number
            if found is None:
                continue
            if isinstance(found, Rejected):
                counted.reject(found)
                continue
            if isinstance(found, list):
                text = found
            else:
                text = self._split(found) if self._split else [found]
            try:
                size += sum(len(one.encode()) for one in text)
            except UnicodeEncodeError as error:
                counted.reject(Rejected(number, surrogate_fault(error)))
                continue
            texts.append(text)
            if size >= self._packer.many:
                counted.counts["text_bytes"] += size
                self._encode(texts, counted, out)
                texts = []
                size = 0
        counted.counts["text_bytes"] += size
        self._encode(texts, counted, out)

    def _encode(self, texts: Sequence[list[str]], counted: Counted, out: _Out) -> None:
        flat = [one for text in texts for one in text]
        packed = self._packer.pack(flat)
        counts = counted.counts
        place = 0
        size = self.dtype.itemsize
        for text in texts:
            held = [one for one in packed[place : place + len(text)] if one]
            place += len(text)
            if held:
                held[-1] += self._eod
            out.tokens += held
            lengths = [len(one) // size for one in held]
            out.lengths += lengths
            out.sequences.append(len(held))
            counts["tokens"] += sum(lengths)
            counts["sequences"] += len(held)
            counts["empty"] += not held
        counts["documents"] += len(texts)
        counts["words"] += sum(len(one.split()) for one in flat)
        if self.encoder.unk is not None:
            self._count_unknown(flat, packed, counts)

    def _count_unknown(
        self, texts: Sequence[str], packed: Sequence[bytes], counts: dict[str, int]
    ) -> None:
        found = np.frombuffer(b"".join(packed), self.dtype) == self.encoder.unk
        if not found.any():
            return
        counts["unknown_tokens"] += int(found.sum())
        for text, one in zip(texts, packed, strict=True):
            if (np.frombuffer(one, self.dtype) == self.encoder.unk).any():
                counts["unknown_bytes"] += self.encoder.unknown_bytes(text)


class _Out:
    def __init__(self) -> None:
        self.tokens = list[bytes]()
        self.lengths = list[int]()
        self.sequences = list[int]()
        self.parts = list[Counted]()


def dtype_of(encoder: Encoder, chosen: str | None) -> np.dtype:
    """Return the dtype of tokens: what was chosen, or what Megatron takes.

    Raises:
        ConfigError: the chosen one cannot hold the ids of the tokenizer.
    """
    from mtrain.data.store.indexed import token_dtype

    if chosen is None:
        return token_dtype(encoder.vocab_size)
    dtype = np.dtype(chosen)
    if encoder.vocab_size - 1 > np.iinfo(dtype).max:
        rule = (
            f"holds ids to {np.iinfo(dtype).max}, and the tokenizer has ids to"
            f" {encoder.vocab_size - 1}"
        )
        raise ConfigError([Problem("MT603", "dtype", chosen, rule, "dtype=int32", "command line")])
    return dtype
