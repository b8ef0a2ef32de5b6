"""Megatron's `.bin/.idx` files: a reader that validates everything at open, and a vectorised writer.

Their layout stands in `config/token_files.py`.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mtrain.config.token_files import CODES, HEADER, MAGIC, read_header
from mtrain.data.remote import SUFFIX, RemoteTokens
from mtrain.errors import CorruptData

DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in CODES.items()}
"""Dtype code -> dtype, of little-endian token files."""
CHUNK = 1 << 17
LONG = 1 << 23
"""Numbers of which a thread more is worth its while."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron picks for token ids below `vocab_size`."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` + suffix; unlike Path.with_suffix a dot in the prefix stays."""
    return prefix.with_name(prefix.name + suffix)


class IndexedDataset:
    """A token corpus in memory maps. Opening reads the whole `.idx` and refuses what does not add up.

    `tokens` is the stream of all documents, a flat array of `dtype`. Raises CorruptData, naming file and offset.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.idx = with_suffix(self.prefix, ".idx")
        self.bin: Path | str = with_suffix(self.prefix, ".bin")
        raw = _map(self.idx)
        header = read_header(self.idx, raw[: HEADER.size].tobytes(), raw.nbytes)
        self.dtype, count, index_count = DTYPES[header.code], header.count, header.indices
        at_pointers, at_documents = header.pointers_at, header.documents_at
        self.lengths = np.frombuffer(raw, "<i4", count, HEADER.size)
        self.pointers = np.frombuffer(raw, "<i8", count, at_pointers)
        self.document_indices = np.frombuffer(raw, "<i8", index_count, at_documents)
        total = _check_pointers(self.idx, self.lengths, self.pointers, self.dtype.itemsize)
        _check_documents(self.idx, self.document_indices, count, at_documents)
        far = with_suffix(self.prefix, SUFFIX).is_file()
        held: Any = RemoteTokens(self.prefix, self.dtype) if far else _map(with_suffix(self.prefix, ".bin"))
        if far:
            self.bin = f"{held.store.name}.bin"
        if held.nbytes != total:
            raise CorruptData(
                f"{self.bin}: {held.nbytes} bytes, but {self.idx.name} describes {total} "
                f"({total // self.dtype.itemsize} tokens of {self.dtype.itemsize} bytes)"
            )
        self.tokens: Any = held if far else np.frombuffer(held, self.dtype)

    @property
    def is_remote(self) -> bool:
        """Whether its tokens are fetched when they are asked for."""
        return isinstance(self.tokens, RemoteTokens)

    def pieces(self, starts: list[int], length: int) -> list[np.ndarray]:
        """So many tokens from each of some places of the stream on."""
        if isinstance(self.tokens, RemoteTokens):
            return self.tokens.pieces(starts, length)
        return [self.tokens[start : start + length] for start in starts]

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""
        return len(self.tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Tokens of one sequence."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def document_start(self, document: int) -> int:
        """Place of a document's first token in the stream; of document `num_documents`, the stream's end."""
        sequence = int(self.document_indices[document])
        return int(self.pointers[sequence]) // self.dtype.itemsize if sequence < len(self) else self.num_tokens

    def document_at(self, place: int) -> int:
        """Which document holds the token at `place` of the stream."""
        sequence = int(np.searchsorted(self.pointers, place * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1


def _map(path: Path) -> np.ndarray:
    """The bytes of a file as a read-only map; an empty file as an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise CorruptData(f"{path}: cannot be read: {error.strerror}") from error


def _check_pointers(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Refuse negative lengths and pointers that are not the running sum; bytes of `.bin`."""

    def wrong(first: int, stop: int) -> int | None:
        """The first sequence of some that is wrong, by itself or by where the next one begins."""
        bytes_, steps, differ = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64), np.empty(CHUNK, np.bool_)
        for at in range(first, stop, CHUNK):
            here = lengths[at : min(at + CHUNK, stop)]
            if here.min() < 0:
                return at
            ahead = pointers[at + 1 : at + len(here) + 1]  # one less at the end of all
            n = len(ahead)
            np.multiply(here[:n], itemsize, out=bytes_[:n], dtype=np.int64)
            np.subtract(ahead, pointers[at : at + n], out=steps[:n])
            if np.not_equal(steps[:n], bytes_[:n], out=differ[:n]).any():
                return at
        return None

    if not len(lengths):
        return 0
    at = 0 if pointers[0] != 0 else _first(wrong, len(lengths))
    if at is None:
        return int(pointers[-1]) + int(lengths[-1]) * itemsize
    raise _wrong_pointer(path, lengths, pointers, itemsize, at)


def _wrong_pointer(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, at: int) -> CorruptData:
    """What is wrong with the first sequence from `at` on with which something is."""
    here = lengths[at : at + CHUNK].astype(np.int64)
    negative = np.flatnonzero(here < 0)[:1] + at
    begins = pointers[at : at + CHUNK + 1].copy()
    jumps = np.flatnonzero(np.diff(begins) != here[: len(begins) - 1] * itemsize)[:1] + at + 1
    if len(negative) and not (len(jumps) and jumps[0] < negative[0]) and pointers[0] == 0:
        bad = int(negative[0])
        return CorruptData(f"{path}: offset {HEADER.size + 4 * bad}: sequence {bad} has length {lengths[bad]}")
    bad = 0 if pointers[0] != 0 else int(jumps[0])
    end = 0 if bad == 0 else int(pointers[bad - 1]) + int(lengths[bad - 1]) * itemsize
    return CorruptData(
        f"{path}: offset {HEADER.size + 4 * len(lengths) + 8 * bad}: pointer of sequence {bad} is {pointers[bad]}, "
        f"the sequences before it end at {end} ({itemsize} bytes a token): wrong dtype code or a damaged index"
    )


def _check_documents(path: Path, indices: np.ndarray, count: int, offset: int) -> None:
    """Refuse document indices that do not rise from 0 to the number of sequences."""
    if indices[0] != 0 or indices[-1] != count:
        raise CorruptData(
            f"{path}: offset {offset}: document indices go from {indices[0]} to {indices[-1]}, must be 0 to {count}"
        )

    def wrong(first: int, stop: int) -> int | None:
        """A chunk in which an index is less than the one before it."""
        falls = np.empty(CHUNK, np.bool_)
        for at in range(first, stop, CHUNK):
            here = indices[at : min(at + CHUNK, stop) + 1]
            if np.less(here[1:], here[:-1], out=falls[: len(here) - 1]).any():
                return at
        return None

    at = _first(wrong, len(indices) - 1)
    if at is not None:
        bad = at + 1 + int(np.argmax(np.diff(indices[at : at + CHUNK + 1]) < 0))
        raise CorruptData(
            f"{path}: offset {offset + 8 * bad}: document index {bad} is {indices[bad]}, "
            f"less than {indices[bad - 1]} before it"
        )


def _first(wrong: Callable[[int, int], int | None], count: int) -> int | None:
    """What `wrong` finds first in the range of `count`, looked through by several threads where it is long."""
    threads = min(4, os.cpu_count() or 1, 1 + count // LONG)
    if threads < 2:
        return wrong(0, count)
    cuts = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(wrong, cuts[:-1], cuts[1:])
        return next((at for at in found if at is not None), None)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype, document_indices: np.ndarray | None = None) -> None:
    """Write an `.idx` for sequences of these `lengths`; no `document_indices`: each sequence is a document.

    Byte-identical to megatron-core's IndexedDatasetBuilder. Raises CorruptData for an impossible length.
    """
    count, dtype = len(lengths), np.dtype(dtype)
    if count and (int(lengths.min()) < 0 or int(lengths.max()) > np.iinfo(np.int32).max):
        raise CorruptData(f"{path}: lengths {lengths.min()} to {lengths.max()}; an index holds 0 to 2^31 - 1")
    code = next(c for c, d in DTYPES.items() if d == dtype)
    index_count = count + 1 if document_indices is None else len(document_indices)
    short = np.ascontiguousarray(lengths, "<i4")
    # Chunks stay in the processor's cache between being computed and being copied to the file.
    with open(path, "wb", buffering=0) as file:
        _write(file, HEADER.pack(MAGIC, 1, code, count, index_count))
        _write(file, short)
        end = 0
        for first in range(0, count, CHUNK):
            here = short[first : first + CHUNK]
            pointers = np.cumsum(here, dtype=np.int64)
            pointers -= here
            pointers *= dtype.itemsize
            pointers += end
            end = int(pointers[-1]) + int(here[-1]) * dtype.itemsize
            _write(file, pointers)
        if document_indices is not None:
            _write(file, np.ascontiguousarray(document_indices, "<i8"))
            return
        for first in range(0, index_count, CHUNK):
            _write(file, np.arange(first, min(first + CHUNK, index_count), dtype="<i8"))


def _write(file: io.FileIO, data: bytes | np.ndarray) -> None:
    """Write all of `data`; an unbuffered file may take it in parts."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")  # type: ignore[arg-type]
    while view:
        view = view[file.write(view) :]


class IndexedWriter:
    """Writes a corpus: `add` documents, `close` writes the index (leaving a `with` block closes)."""

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self._limits = np.iinfo(self.dtype)
        self._lengths: list[np.ndarray] = []
        self._digest = hashlib.sha256()
        self._file = open(with_suffix(self.prefix, ".bin"), "wb")  # noqa: SIM115

    def add(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Add documents: their tokens end to end, and the length of each; None: one document.

        Raises CorruptData for a token id that the dtype cannot hold.
        """
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths)
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths add up to {lengths.sum()}, there are {len(tokens)} tokens")
        if len(tokens) and not self._limits.min <= int(tokens.min()) <= int(tokens.max()) <= self._limits.max:
            raise CorruptData(
                f"{self.prefix}: token ids {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}"
            )
        data = memoryview(np.ascontiguousarray(tokens, self.dtype)).cast("B")  # type: ignore[arg-type]
        self._digest.update(data)
        self._file.write(data)
        self._lengths.append(lengths)

    def close(self) -> dict[str, str]:
        """Write the index and flush both files to the disk; sha256 by suffix."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int64)
        idx = with_suffix(self.prefix, ".idx")
        write_index(idx, lengths, self.dtype)
        with open(idx, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256")
        return {".bin": self._digest.hexdigest(), ".idx": digest.hexdigest()}

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
        elif not self._file.closed:
            self.close()
