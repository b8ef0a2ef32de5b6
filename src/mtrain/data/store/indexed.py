"""Megatron's `.bin/.idx` files: a reader that checks the index at open, and a vectorised writer.

`config/disk/token_files.py` describes their layout.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mtrain.config.disk.token_files import CODES, HEADER, MAGIC, read_header
from mtrain.data.store.index_check import CHUNK, IndexCheck
from mtrain.data.store.memory_map import MemoryMap
from mtrain.data.store.remote import RemoteTokens, is_mirrored
from mtrain.errors import CorruptData

DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in CODES.items()}
"""Dtype code -> dtype, of little-endian token files."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron picks for token ids below `vocab_size`."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return `prefix` + suffix; unlike Path.with_suffix, this keeps a dot in the prefix."""
    return prefix.with_name(prefix.name + suffix)


class IndexedDataset:
    """A token corpus in memory maps. Opening refuses an `.idx` that does not add up.

    `tokens` is the stream of all documents, a flat array of `dtype`. Without `whole`, only the ends
    and some parts of an index of more than `index_check.LARGE` sequences are checked at open, and
    `look_on` checks the rest part by part. Raises CorruptData with file and offset.
    """

    def __init__(self, prefix: str | Path, *, whole: bool = True) -> None:
        self.prefix = Path(prefix)
        self.idx = with_suffix(self.prefix, ".idx")
        self.bin: Path | str = with_suffix(self.prefix, ".bin")
        index = MemoryMap(self.idx)
        if not whole:
            index.scatter()
        raw = index.bytes
        header = read_header(self.idx, raw[: HEADER.size].tobytes(), raw.nbytes)
        self.dtype = DTYPES[header.code]
        count = header.count
        index_count = header.indices
        self.lengths = np.frombuffer(raw, "<i4", count, HEADER.size)
        self.pointers = np.frombuffer(raw, "<i8", count, header.pointers_at)
        self.document_indices = np.frombuffer(raw, "<i8", index_count, header.documents_at)
        arrays = self.lengths, self.pointers, self.document_indices
        self._check = IndexCheck(self.idx, index, arrays, self.dtype.itemsize)
        total = self._check.opened(whole=whole)
        far = is_mirrored(self.prefix)
        self._file = None if far else MemoryMap(with_suffix(self.prefix, ".bin"))
        held: Any = (
            RemoteTokens(self.prefix, self.dtype) if self._file is None else self._file.bytes
        )
        if far:
            self.bin = f"{held.store.name}.bin"
        elif self._file is not None and not whole:
            self._file.scatter()
        if held.nbytes != total:
            raise CorruptData(
                f"{self.bin}: {held.nbytes} bytes, but {self.idx.name} describes {total} "
                f"({total // self.dtype.itemsize} tokens of {self.dtype.itemsize} bytes)"
            )
        self.tokens: Any = held if far else np.frombuffer(held, self.dtype)

    def look_on(self) -> None:
        """Check one more part of a large index.

        Raises CorruptData if it does not add up.
        """
        self._check.look_on()

    @property
    def is_remote(self) -> bool:
        """Return whether its tokens are fetched from an object store on demand."""
        return isinstance(self.tokens, RemoteTokens)

    def expect(self, starts: Sequence[int] | np.ndarray, length: int) -> None:
        """Announce reads of `length` tokens from each of some places of the stream."""
        if self._file is None:
            self.tokens.expect(starts, length)
        else:
            size = self.dtype.itemsize
            self._file.expect((int(start) * size for start in starts), length * size)

    def pieces(self, starts: list[int], length: int) -> list[np.ndarray]:
        """Return `length` tokens from each of some places of the stream."""
        if isinstance(self.tokens, RemoteTokens):
            return self.tokens.pieces(starts, length)
        self.expect(starts, length)
        return [self.tokens[start : start + length] for start in starts]

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Return the tokens of one sequence."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def document_start(self, document: int) -> int:
        """Return the place of a document's first token; for document `num_documents`, the end."""
        sequence = self._check.sequence(document)
        if sequence < len(self):
            return int(self.pointers[sequence]) // self.dtype.itemsize
        return self.num_tokens

    def document_starts(self, documents: range) -> np.ndarray:
        """Return the starts of consecutive documents and the end of the last; int64.

        Raises CorruptData if their part of the index does not add up.
        """
        self._check.look_at(documents)
        sequences = self.document_indices[documents.start : documents.stop + 1]
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        # documents after the last sequence are empty
        inside = int(np.searchsorted(sequences, len(self)))
        np.floor_divide(self.pointers[sequences[:inside]], self.dtype.itemsize, out=starts[:inside])
        return starts

    def document_at(self, place: int) -> int:
        """Return the document with the token at `place` of the stream."""
        sequence = (
            int(np.searchsorted(self.pointers, place * self.dtype.itemsize, side="right")) - 1
        )
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1


def write_index(
    path: Path, lengths: np.ndarray, dtype: np.dtype, document_indices: np.ndarray | None = None
) -> None:
    """Write an `.idx` for sequences of these `lengths`, byte-identical to megatron-core's builder.

    Without `document_indices`, each sequence is a document. Raises CorruptData for an impossible
    length.
    """
    count = len(lengths)
    dtype = np.dtype(dtype)
    if count and (int(lengths.min()) < 0 or int(lengths.max()) > np.iinfo(np.int32).max):
        raise CorruptData(
            f"{path}: lengths {lengths.min()} to {lengths.max()}; an index holds 0 to 2^31 - 1"
        )
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
    """Writer of a corpus: `add` documents, then `close`, or leave the `with` block, for
    the index.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self._limits = np.iinfo(self.dtype)
        self._lengths: list[np.ndarray] = []
        self._digest = hashlib.sha256()
        self._file = open(with_suffix(self.prefix, ".bin"), "wb")  # noqa: SIM115

    def add(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Add documents, given as their tokens end to end and the length of each.

        Without lengths, the tokens are one document. Raises CorruptData for a token id that the
        dtype cannot hold.
        """
        lengths = np.array([len(tokens)]) if lengths is None else np.asarray(lengths)
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths add up to {lengths.sum()}, there are {len(tokens)} tokens")
        if (
            len(tokens)
            and not self._limits.min <= int(tokens.min()) <= int(tokens.max()) <= self._limits.max
        ):
            raise CorruptData(
                f"{self.prefix}: token ids {tokens.min()} to {tokens.max()} do not fit"
                f" {self.dtype.name}"
            )
        data = memoryview(np.ascontiguousarray(tokens, self.dtype)).cast("B")  # type: ignore[arg-type]
        self._digest.update(data)
        self._file.write(data)
        self._lengths.append(lengths)

    def close(self) -> dict[str, str]:
        """Write the index, flush both files to the disk, and return their sha256 by suffix."""
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._file.close()
        elif not self._file.closed:
            self.close()
