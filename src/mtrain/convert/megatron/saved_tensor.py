"""A tensor as torch saves it: the place of its numbers in a file, without unpickling anything.

It is an uncompressed zip archive: `data.pkl` has shape, strides and number format, `data/0` the
numbers.

Source: `torch.serialization`, torch 2.13, and the specification of zip (APPNOTE 6.3.10, 4.3.7).
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from mtrain.convert.megatron import pickled
from mtrain.convert.megatron.pickled import Name, Record, Reference
from mtrain.convert.megatron.torch_dist import DTYPES, Chunk, Stored
from mtrain.convert.plain_file import open_plain
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData

MAX_PICKLE_BYTES = MAX_DIRECTORY_BYTES = 1 << 20
"""Limits of the pickle of one tensor, and of the directory of its four or five entries; usual ones
are a thousand times smaller.
"""
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
    """The place of a chunk's numbers: element `index` is at `start` plus the sum of index times
    stride, in numbers.
    """

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
    """Return number format, name and numbers of its storage, its first number in it, shape and
    strides of a saved tensor.
    """
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
