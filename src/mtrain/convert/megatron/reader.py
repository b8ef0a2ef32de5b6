"""Weights of a checkpoint of megatron-core in memory, a layer or an expert at a time.

A tensor as torch saves it is an uncompressed zip archive: `data.pkl` has shape, strides and number
format, `data/0` the numbers. Nothing is unpickled.

Source: `torch.serialization`, torch 2.13, and the specification of zip (APPNOTE 6.3.10, 4.3.7).
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

from mtrain.ckpt.hashes import hash_bytes
from mtrain.convert.megatron import pickled
from mtrain.convert.megatron.pickled import Name, Record, Reference
from mtrain.convert.megatron.torch_dist import DTYPES, Chunk, Stored, TorchDist
from mtrain.convert.plain_file import open_plain
from mtrain.convert.raw_arrays import RawArray, buffer_of, empty
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData
from mtrain.models.gpt.torch_dist import GATE, UP, counted_axes, is_weight, one_name

FORMATS = ("F64", "F32", "F16", "BF16")
MOST_PARTS = 1 << 19
"""Layers times experts of all tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a checkpoint, or one place of a tensor that counts layers or experts."""

    stored: Stored
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the tensor, and the place in it."""
        return f"{self.stored.name}{list(self.numbers)}" if self.numbers else self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape without the axes that count layers or experts."""
        return self.stored.shape[len(self.numbers) :]

    @property
    def dtype(self) -> str:
        """Return the number format, as safetensors names it."""
        return self.stored.dtype


class TorchDistReader:
    """The weights of a checkpoint by name, with a hash of everything that was read."""

    def __init__(self, source: TorchDist) -> None:
        """Take what `open_torch_dist` gave.

        Raises:
            CorruptData: a weight is not made of floating-point numbers, or of too many layers.
        """
        self.source = source
        self.hashes: dict[str, str] = {}
        self._count = 0
        self._held: dict[str, list[tuple[Part, ...]]] = defaultdict(list)
        self._by_place: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        for stored in source.tensors.values():
            if is_weight(stored.name):
                self._add(stored)
        self._join_halves()
        self.names = frozenset(self._held)
        """Names of weights, each once."""
        parts = {part.name: part for held in self._held.values() for one in held for part in one}
        self.folder = SimpleNamespace(tensors=parts)

    def _add(self, stored: Stored) -> None:
        if stored.dtype not in FORMATS:
            raise CorruptData(
                f"{stored.name[:200]} has numbers of kind {stored.dtype}, which is no weight's"
            )
        # a stacked tensor counts layers, and its experts, along its first axes
        axes = counted_axes(stored.name)
        counts = stored.shape[:axes]
        self._count += prod(counts)
        if len(counts) < axes or self._count > MOST_PARTS:
            raise CorruptData(
                f"{stored.name[:200]} of shape {list(stored.shape)} does not count layers"
            )
        for numbers in product(*map(range, counts)):
            self._held[one_name(stored.name, numbers)].append((Part(stored, numbers),))

    def _join_halves(self) -> None:
        for gate in [name for name in self._held if name.endswith(GATE)]:
            # megatron-core stores gate and up of SwiGLU apart; mtrain has both in one weight
            whole = gate.removesuffix(GATE)
            if f"{whole}{UP}" in self._held:
                gates = self._held.pop(gate)
                ups = self._held.pop(f"{whole}{UP}")
                if len(gates) != len(ups):
                    raise CorruptData(
                        f"{whole[:200]} has {len(gates)} gates, and {len(ups)} of what they gate"
                    )
                self._held[whole] += [
                    first + second for first, second in zip(gates, ups, strict=True)
                ]

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of all parts of the checkpoint's tensors that hold a weight."""
        return tuple(part.name for one in self._held[name] for part in one)

    def dtype(self, name: str) -> str:
        """Return the number format of a weight."""
        return self._held[name][0][0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        first, *others = self._held[name][0]
        if others and first.shape:
            return (first.shape[0] + others[0].shape[0], *first.shape[1:])
        return first.shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight."""
        return prod(self.shape(name)) * BYTES[self.dtype(name)]

    def decoding(self, name: str) -> str:
        """Return how a weight is assembled, or "" if it is one tensor."""
        words = ["gate over up"] * (len(self._held[name][0]) > 1) + ["held twice"] * (
            len(self._held[name]) > 1
        )
        return ", ".join(words)

    def tensor(self, name: str) -> RawArray:
        """Return a weight. It may be there under several names, as a norm is; then all are read.

        Raises:
            CorruptData: it cannot be read, or its copies differ.
        """
        # stored twice, it has to be the same twice
        found, *others = (self._whole(parts) for parts in self._held[name])
        for (part, *_), other in zip(self._held[name][1:], others, strict=True):
            if part.dtype != self.dtype(name) or not np.array_equal(found, other):
                raise CorruptData(
                    f"{part.name} and {self._held[name][0][0].name} are the same weight and differ"
                )
        return found

    def hash_of(self, name: str) -> str:
        """Return the hex sha256 of a weight that was read; empty if it was assembled."""
        (parts, *_) = self._held[name]
        return "" if len(parts) > 1 else self.hashes[parts[0].name]

    def _whole(self, parts: tuple[Part, ...]) -> RawArray:
        """Return a weight from its one part, or from gate and up."""
        if len(parts) > 1 and (
            not parts[0].shape or len({(part.dtype, part.shape[1:]) for part in parts}) > 1
        ):
            raise CorruptData(f"{parts[0].name} and {parts[1].name} do not fit together")
        read = [self._read(part) for part in parts]
        return np.concatenate(read) if len(read) > 1 else read[0]

    def _read(self, part: Part) -> RawArray:
        out = empty(part.shape, part.dtype)
        box = out.reshape((1,) * len(part.numbers) + part.shape)
        offset = part.numbers + (0,) * len(part.shape)
        for chunk in self._chunks(part):
            _copy(part.stored, chunk, box, offset)
        if part.name not in self.hashes:
            self.hashes[part.name] = hash_bytes(buffer_of(out))
        return out

    def _chunks(self, part: Part) -> Iterable[Chunk]:
        """Yield the chunks of a part: its own, and any that span several parts."""
        lead = len(part.numbers)
        if part.stored.name not in self._by_place:
            placed: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
            for chunk in part.stored.chunks:
                # chunks of one layer are found by its number, instead of among those of all
                placed[chunk.offset[:lead] if prod(chunk.shape[:lead]) == 1 else ()].append(chunk)
            self._by_place[part.stored.name] = dict(placed)
        placed = self._by_place[part.stored.name]
        yield from placed.get(part.numbers, [])
        if part.numbers:
            yield from placed.get((), [])


def _copy(stored: Stored, chunk: Chunk, box: RawArray, offset: tuple[int, ...]) -> None:
    """Fill in a chunk's part of `box` at `offset` of the tensor, reading no more of it."""
    lows = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
    highs = [
        min(a + n, b + m)
        for a, n, b, m in zip(offset, box.shape, chunk.offset, chunk.shape, strict=True)
    ]
    sizes = [high - low for low, high in zip(lows, highs, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    numbers = numbers_of(stored, chunk)
    first = sum(
        (low - at) * step for low, at, step in zip(lows, chunk.offset, numbers.strides, strict=True)
    )
    count = 1 + sum((size - 1) * step for size, step in zip(sizes, numbers.strides, strict=True))
    place: Any = [
        slice(low - at, high - at) for low, high, at in zip(lows, highs, offset, strict=True)
    ]
    here = box[(*place, ...)]
    # one read of the whole range: rows that are apart would need a read each
    flat = np.empty(count, box.dtype)
    with open_plain(chunk.path) as file:
        try:
            file.seek(numbers.start + first * box.itemsize)
            _fill(file, buffer_of(flat), stored.name)
        except OSError as error:
            raise CorruptData(
                f"{chunk.path}: {stored.name[:200]} cannot be read: {error.strerror}"
            ) from None
    here[...] = np.lib.stride_tricks.as_strided(
        flat, sizes, [step * box.itemsize for step in numbers.strides]
    )


def _fill(file: Any, buffer: memoryview, name: str) -> None:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise CorruptData(f"{file.name}: the file ends within {name[:200]}")
        done += count


MAX_PICKLE_BYTES = 1 << 20
MAX_DIRECTORY_BYTES = MAX_PICKLE_BYTES
"""Limits of a tensor's pickle and of its directory, usually a thousand times smaller."""
_LOCAL_HEADER = 30
_ORDER = b"little"
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_UNTYPED = "torch.storage.UntypedStorage"
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
ADMITTED = frozenset(
    [*_STORAGES, _UNTYPED, *_TENSORS, _PARAMETER, "collections.OrderedDict", *DTYPES]
)
"""Names that the pickle of a tensor may hold."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The place of a chunk's numbers: `index` is at `start` plus the sum of index * stride."""

    path: Path
    start: int
    """Byte of the file at which element 0 is."""
    strides: tuple[int, ...]


def numbers_of(tensor: Stored, chunk: Chunk) -> Numbers:
    """Return the place of a chunk's numbers, after checking shape and format with the metadata.

    Raises:
        CorruptData: the bytes of the chunk are no tensor that torch saved, or another one; nothing
            of them was run.
    """
    where = f"{chunk.path}: the chunk of {tensor.name[:200]} at byte {chunk.start}"
    with open_plain(chunk.path) as file, _Window(file, chunk) as window:
        try:
            with zipfile.ZipFile(window) as archive:
                return _find(archive, window, tensor, chunk, where)
        except (
            zipfile.BadZipFile,
            ValueError,
            struct.error,
            EOFError,
            NotImplementedError,
            OverflowError,
        ) as error:
            raise CorruptData(
                f"{where} is no tensor that torch saved: {str(error)[:100]}"
            ) from None
        except (OSError, RuntimeError, IndexError, TypeError, AttributeError):
            raise CorruptData(f"{where} is no tensor that torch saved") from None


def _find(
    archive: zipfile.ZipFile, window: _Window, tensor: Stored, chunk: Chunk, where: str
) -> Numbers:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "byteorder" in entries:
        start, size = window.stored(entries["byteorder"], where)
        if window.bytes_at(start, min(size, len(_ORDER) + 1)) != _ORDER:
            raise CorruptData(f"{where} has numbers in another order of bytes")
    if "data.pkl" not in entries:
        raise CorruptData(f"{where} is no tensor that torch saved: it has no data.pkl")
    start, size = window.stored(entries["data.pkl"], where)
    if size > MAX_PICKLE_BYTES:
        raise CorruptData(f"{where}: its data.pkl has {size} bytes")
    made = pickled.read(window.bytes_at(start, size), ADMITTED, where)
    # a parameter is a tensor in one more call
    if isinstance(made, Record) and made.name == _PARAMETER and made.arguments:
        made = made.arguments[0]
    dtype, key, held, first, shape, strides = _described(made, where)
    if dtype != tensor.dtype or shape != chunk.shape:
        stated = f"{tensor.dtype} of shape {list(chunk.shape)}"
        raise CorruptData(
            f"{where} is {dtype} of shape {list(shape)[:16]}, and the metadata says {stated}"
        )
    if f"data/{key}" not in entries:
        raise CorruptData(f"{where} lacks its numbers")
    start, size = window.stored(entries[f"data/{key}"], where)
    # strides of a foreign file must not lead out of its storage
    last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if held * BYTES[dtype] > size or last >= held or prod(shape) > held:
        raise CorruptData(f"{where} has fewer numbers than its shape {list(shape)}")
    return Numbers(chunk.path, chunk.start + start + first * BYTES[dtype], strides)


Described = tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]


def _described(made: Any, where: str) -> Described:
    """Return format, name and size of its storage, and offset, shape and strides of a tensor."""
    wrong = CorruptData(f"{where} is no tensor that torch saved")
    if not isinstance(made, Record) or made.name not in _TENSORS or len(made.arguments) < 4:
        raise wrong
    storage, first, shape, strides = made.arguments[:4]
    if (
        not isinstance(storage, Reference)
        or not isinstance(storage.value, tuple)
        or len(storage.value) != 5
    ):
        raise wrong
    word, kind, key, _, held = storage.value
    if word != "storage" or not isinstance(kind, Name) or not isinstance(key, str):
        raise wrong
    if isinstance(shape, Record) and len(shape.arguments) == 1:
        (shape,) = shape.arguments
    sizes = (
        [*shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else [None]
    )
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in (first, held, *sizes)) or len(
        shape
    ) != len(strides):
        raise wrong
    dtype = _STORAGES.get(kind.text)
    if kind.text == _UNTYPED and isinstance(made.arguments[-1], Name):
        dtype = DTYPES.get(made.arguments[-1].text)
        # an untyped storage counts bytes
        held //= BYTES[dtype] if dtype else 1
    if dtype is None:
        raise CorruptData(f"{where} has numbers of a kind that is not read: {kind.text}")
    return dtype, key, held, first, shape, strides


class _Window(io.RawIOBase):
    """The bytes of a chunk as a file of their own."""

    def __init__(self, file: BinaryIO, chunk: Chunk) -> None:
        self.file = file
        self.chunk = chunk
        self.at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self.at, self.chunk.length)[whence]
        if at < 0:
            raise ValueError("it is cut")
        self.at = at
        return at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes."""
        room = max(0, self.chunk.length - self.at)
        size = room if size < 0 else min(size, room)
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size} bytes")
        self.file.seek(self.chunk.start + self.at)
        data = self.file.read(size) or b""
        self.at += len(data)
        return data

    def bytes_at(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on."""
        self.seek(start)
        data = bytearray()
        while len(data) < size and (piece := self.read(size - len(data))):
            data += piece
        if len(data) < size:
            raise ValueError("it is cut")
        return bytes(data)

    def stored(self, info: zipfile.ZipInfo, where: str) -> tuple[int, int]:
        """Return first byte and size of an entry; refuse a compressed one or one outside."""
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.file_size != info.compress_size
            or info.flag_bits & 1
        ):
            raise CorruptData(f"{where} is compressed, which torch does not do")
        # the directory may point anywhere
        if not 0 <= info.header_offset <= self.chunk.length - _LOCAL_HEADER:
            raise CorruptData(f"{where} is no tensor that torch saved: an entry is outside of it")
        header = self.bytes_at(info.header_offset, _LOCAL_HEADER)
        name, extra = struct.unpack("<HH", header[26:30])
        # lengths of the local header, which may differ from those of the directory
        start = info.header_offset + _LOCAL_HEADER + name + extra
        if header[:4] != b"PK\x03\x04" or not 0 <= info.file_size <= self.chunk.length - start:
            raise CorruptData(f"{where} is no tensor that torch saved: an entry is outside of it")
        return start, info.file_size
