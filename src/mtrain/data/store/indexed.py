"""Token files of megatron-core, `.bin` and `.idx`: memory maps, the check of an index, a writer."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mtrain.config.disk.token_files import CODES, HEADER, MAGIC, read_header
from mtrain.data.store.remote import RemoteTokens, is_mirrored
from mtrain.errors import CorruptData

# Bytes that one MADV_WILLNEED makes Linux read, on a disk with its default readahead
AT_ONCE = 128 << 10


class MemoryMap:
    """The bytes of a file, which may be empty.

    Raises CorruptData for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._scattered = False
        try:
            with open(path, "rb") as file:
                if path.stat().st_size:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptData(
                f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        self.bytes = np.frombuffer(self._map or b"", np.uint8)

    def scatter(self) -> None:
        """Turn readahead off, which would read megabytes around each place of a random read."""
        if self._map is not None and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
            self._scattered = True

    def expect(self, starts: Iterable[int], size: int) -> None:
        """Start to read `size` bytes at some places from the disk, if readahead is off."""
        if self._map is None or not self._scattered:
            return
        for start in starts:
            first = start - start % mmap.PAGESIZE
            stop = min(start + size, len(self.bytes))
            for at in range(first, stop, AT_ONCE):
                self._map.madvise(mmap.MADV_WILLNEED, at, min(AT_ONCE, stop - at))


CHUNK = 1 << 17
# Numbers that justify one more thread
LONG = 1 << 23
# Most sequences and documents of an index that is checked at once: 84 MB
LARGE = 1 << 22
PARTS = 32
# Number of parts of a larger index that are checked at open, and their sequences and documents
PART = 1 << 10
# Sequences and documents of a larger index that are checked with each step of the run
STEP = 1 << 18


class IndexCheck:
    """The check of an index; raises CorruptData with file and offset."""

    def __init__(
        self,
        path: Path,
        file: MemoryMap,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        itemsize: int,
    ) -> None:
        """Take the lengths, pointers and document indices of the file as `arrays`."""
        self._path = path
        self._file = file
        self._itemsize = itemsize
        self._lengths, self._pointers, self._documents = arrays
        self._size = max(len(self._lengths), len(self._documents) - 1)
        self._next = 0

    def opened(self, *, whole: bool) -> int:
        """Check the index, if large only in parts; return the size of its `.bin`."""
        # An index of 1e8 documents has 2 GB, and a run that opens it reads a few of its samples.
        # Sampled parts find a wrong file at once; `check_next` finds the rest while it trains.
        if whole or self._size <= LARGE:
            self._check_parts([range(self._size)])
            self._next = self._size
        else:
            last = self._size - PART
            self._check_parts(
                [
                    range(last * i // (PARTS - 1), last * i // (PARTS - 1) + PART)
                    for i in range(PARTS)
                ]
            )
        if len(self._lengths):
            return int(self._pointers[-1]) + int(self._lengths[-1]) * self._itemsize
        return 0

    def check_next(self) -> None:
        """Check the next part of a large index."""
        if self._next < self._size:
            self._check_parts([range(self._next, min(self._next + STEP, self._size))])
            self._next += STEP

    def check_documents(self, documents: range) -> None:
        """Check some consecutive documents and their sequences."""
        if self._next < self._size:
            _check_documents(self._path, self._documents, len(self._lengths), [documents])
            held = range(self.sequence(documents.start), self.sequence(documents.stop))
            if held:
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [held])

    def sequence(self, document: int) -> int:
        """Return the first sequence of a document."""
        sequence = int(self._documents[document])
        count = len(self._lengths)
        # unchecked parts of the index are compared before they lead to a place in the `.bin`
        if self._next < self._size:
            if not 0 <= sequence <= count:
                raise CorruptData(
                    f"{self._path}: offset {HEADER.size + 12 * count + 8 * document}: document"
                    f" index {document} is {sequence}, and there are {count} sequences"
                )
            around = range(max(0, sequence - 1), min(sequence + 1, count))
            if around:
                _check_pointers(self._path, self._lengths, self._pointers, self._itemsize, [around])
        return sequence

    def _check_parts(self, parts: list[range]) -> None:
        # without readahead, all parts are requested before the first is compared
        count = len(self._lengths)
        documents = len(self._documents) - 1
        for at, size in (
            (HEADER.size, 4),
            (HEADER.size + 4 * count, 8),
            (HEADER.size + 12 * count, 8),
        ):
            for part in parts:
                self._file.expect([at + size * part.start], size * len(part))
        if count:
            _check_pointers(
                self._path, self._lengths, self._pointers, self._itemsize, _within(parts, count)
            )
        _check_documents(self._path, self._documents, count, _within(parts, documents))


def _within(parts: list[range], count: int) -> list[range]:
    """Return ranges without their places from `count` on."""
    return [range(min(part.start, count), min(part.stop, count)) for part in parts]


def _check_pointers(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, parts: list[range]
) -> None:
    """Refuse negative lengths and pointers that are not the running sum."""

    def wrong(first: int, stop: int) -> int | None:
        """Return the start of the first chunk with a wrong length or pointer."""
        # used for every chunk, so that they stay in the processor's cache
        bytes_ = np.empty(CHUNK, np.int64)
        steps = np.empty(CHUNK, np.int64)
        differ = np.empty(CHUNK, np.bool_)
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

    at = 0 if pointers[0] != 0 else _first(wrong, parts)
    if at is not None:
        raise _wrong_pointer(path, lengths, pointers, itemsize, at)


def _wrong_pointer(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, at: int
) -> CorruptData:
    """Return the error of the first wrong sequence from `at` on."""
    here = lengths[at : at + CHUNK].astype(np.int64)
    negative = np.flatnonzero(here < 0)[:1] + at
    begins = pointers[at : at + CHUNK + 1].copy()
    jumps = np.flatnonzero(np.diff(begins) != here[: len(begins) - 1] * itemsize)[:1] + at + 1
    if len(negative) and not (len(jumps) and jumps[0] < negative[0]) and pointers[0] == 0:
        bad = int(negative[0])
        return CorruptData(
            f"{path}: offset {HEADER.size + 4 * bad}: sequence {bad} has length {lengths[bad]}"
        )
    bad = 0 if pointers[0] != 0 else int(jumps[0])
    end = 0 if bad == 0 else int(pointers[bad - 1]) + int(lengths[bad - 1]) * itemsize
    return CorruptData(
        f"{path}: offset {HEADER.size + 4 * len(lengths) + 8 * bad}: pointer of sequence {bad} is"
        f" {pointers[bad]}, the sequences before it end at {end} ({itemsize} bytes a token): wrong"
        " dtype code or a damaged index"
    )


def _check_documents(path: Path, indices: np.ndarray, count: int, parts: list[range]) -> None:
    """Refuse document indices that do not rise from 0 to the number of sequences."""
    offset = HEADER.size + 12 * count
    if indices[0] != 0 or indices[-1] != count:
        raise CorruptData(
            f"{path}: offset {offset}: document indices go from {indices[0]} to {indices[-1]}, must"
            f" be 0 to {count}"
        )

    def wrong(first: int, stop: int) -> int | None:
        """Return the start of the first chunk in which an index falls."""
        falls = np.empty(CHUNK, np.bool_)
        for at in range(first, stop, CHUNK):
            here = indices[at : min(at + CHUNK, stop) + 1]
            if np.less(here[1:], here[:-1], out=falls[: len(here) - 1]).any():
                return at
        return None

    at = _first(wrong, parts)
    if at is not None:
        bad = at + 1 + int(np.argmax(np.diff(indices[at : at + CHUNK + 1]) < 0))
        raise CorruptData(
            f"{path}: offset {offset + 8 * bad}: document index {bad} is {indices[bad]}, "
            f"less than {indices[bad - 1]} before it"
        )


def _first(wrong: Callable[[int, int], int | None], parts: list[range]) -> int | None:
    """Return the first result of `wrong` in some ranges, with several threads for a long range."""
    if len(parts) == 1:
        (part,) = parts
        threads = min(4, os.cpu_count() or 1, 1 + len(part) // LONG)
        parts = [
            part[len(part) * i // threads : len(part) * (i + 1) // threads] for i in range(threads)
        ]
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                found = pool.map(lambda part: wrong(part.start, part.stop), parts)
                return next((at for at in found if at is not None), None)
    return next((at for part in parts if (at := wrong(part.start, part.stop)) is not None), None)


# Dtype code -> dtype, of little-endian token files
DTYPES: dict[int, np.dtype] = {code: np.dtype(name) for code, name in CODES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron picks for token ids below `vocab_size`."""
    # 65,500 and not 65,536 is megatron-core's bound; another one would give another file
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return `prefix` + suffix; unlike Path.with_suffix, this keeps a dot in the prefix."""
    return prefix.with_name(prefix.name + suffix)


class IndexedDataset:
    """A token corpus in memory maps. Opening refuses an `.idx` that does not add up.

    `tokens` is the stream of all documents, a flat array of `dtype`. Without `whole`, only the ends
    and some parts of an index of more than `LARGE` sequences are checked at open, and
    `check_next` checks the rest part by part. Raises CorruptData with file and offset.
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
        self._file: MemoryMap | None = None
        self.tokens: Any
        if is_mirrored(self.prefix):
            self.tokens = RemoteTokens(self.prefix, self.dtype)
            self.bin = f"{self.tokens.store.name}.bin"
            size = self.tokens.nbytes
        else:
            self._file = MemoryMap(with_suffix(self.prefix, ".bin"))
            if not whole:
                self._file.scatter()
            size = self._file.bytes.nbytes
        if size != total:
            raise CorruptData(
                f"{self.bin}: {size} bytes, but {self.idx.name} describes {total} "
                f"({total // self.dtype.itemsize} tokens of {self.dtype.itemsize} bytes)"
            )
        # after the check of the size, which need not be a whole number of tokens
        if self._file is not None:
            self.tokens = np.frombuffer(self._file.bytes, self.dtype)

    def check_next(self) -> None:
        """Check one more part of a large index.

        Raises CorruptData if it does not add up.
        """
        self._check.check_next()

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
        self._check.check_documents(documents)
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
    # the format holds int32; a longer sequence would wrap around to a negative length
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
    """Writer of a corpus: `add` documents, then `close`, or leave the `with` block."""

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
        array = np.ascontiguousarray(tokens, self.dtype)
        data = memoryview(array).cast("B")  # type: ignore[arg-type]
        # hashed on the way, so that no writer reads the file again
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
