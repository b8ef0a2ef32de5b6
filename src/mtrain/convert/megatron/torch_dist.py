"""A checkpoint of megatron-core in its format `torch_dist`: which tensors its files hold.

It is data; needs no torch.

Such a folder is one of torch.distributed.checkpoint: `.metadata` is a pickle with the shape and
chunks of every tensor, and the place of each chunk's bytes in a `.distcp` file. Nothing is
unpickled (`pickled`), and the metadata is compared with the files before any memory is taken.

Source: the classes of `torch.distributed.checkpoint.metadata` and `.filesystem`, torch 2.13.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

from mtrain.convert.megatron import pickled
from mtrain.convert.megatron.pickled import Mapped, Name, Record
from mtrain.convert.plain_file import open_plain, read_plain
from mtrain.convert.raw_arrays import IN_TORCH
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData
from mtrain.processes import without_collecting

METADATA = ".metadata"
BACKEND = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MAX_METADATA_BYTES = 256 << 20
MAX_DIMENSIONS = 8
MAX_NAME = 1000
_LARGEST = 1 << 60
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.distcp")
_ITERATION = re.compile(r"\d{1,12}")
_FOLDER = re.compile(r"iter_\d{7,}")
_TORCH = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_TOP = (f"{_TORCH}.metadata.Metadata", f"{_MEGATRON}.MCoreMetadata")
_SIZE = "torch.Size"
DTYPES = {f"torch.{theirs}": name for name, theirs in IN_TORCH.items()}
"""Number format as torch names it -> as safetensors does."""
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_OF_TORCH = """
    metadata.TensorStorageMetadata metadata.BytesStorageMetadata metadata.MetadataIndex
    metadata.ChunkStorageMetadata metadata.TensorProperties metadata.StorageMeta
    metadata._MEM_FORMAT_ENCODING filesystem._StorageInfo filesystem._StoragePrefix
    planner.SavePlan planner.WriteItem planner.WriteItemType planner.TensorWriteData
"""
ADMITTED = frozenset(
    [
        *_TOP,
        *(f"{_TORCH}.{name}" for name in _OF_TORCH.split()),
        f"{_OLD}.TensorProperties",
        f"{_OLD}.MEM_FORMAT_ENCODING",
        f"{_MEGATRON}.MCoreSavePlan",
        _SIZE,
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        # Python 3.13 moved the class
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        *DTYPES,
    ]
)
"""Names that `.metadata` may contain, also in save plans of megatron-core 0.14 and 0.15."""


_COMMON = "common_state/shard_0_1"
"""The name of the object that holds what 0.16.1 writes to `common.pt`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where the file is that holds it as torch saved it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    start: int
    length: int
    """Bytes of the file from `start`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Chunks that cover the tensor exactly; empty for a tensor that is no weight."""

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class TorchDist:
    """A checkpoint: its tensors by name, and the number of other objects, which are never read."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: int = 0
    common: Chunk | None = None
    """The arguments and other common state, one of the objects since megatron-core 0.19."""


def is_torch_dist(path: Path) -> bool:
    """Return whether a folder is such a checkpoint, or holds some."""
    return path.is_dir() and any((path / name).exists() for name in (METADATA, TRACKER, BACKEND))


def open_torch_dist(path: Path, is_weight: Callable[[str], bool] = lambda name: True) -> TorchDist:
    """Return the tensors that a checkpoint's metadata names, compared with its files.

    Args:
        path: a folder such as `iter_0000100`, or its parent with
            `latest_checkpointed_iteration.txt`.
        is_weight: of which tensors chunks are wanted. Their files are there, hold as many bytes,
            and every number of the tensor is in one chunk.

    Raises:
        CorruptData: no checkpoint, or its metadata does not match its files; nothing of it was run.
    """
    path = _newest(path)
    _check_backend(path)
    data = read_plain(path / METADATA, MAX_METADATA_BYTES)
    with without_collecting():
        return _Reading(path, pickled.read(data, ADMITTED, str(path / METADATA))).checkpoint(
            is_weight
        )


def _newest(path: Path) -> Path:
    """Return the folder of the iteration that the tracker names."""
    # the folder of one iteration, given directly
    if (path / METADATA).exists() or (path / METADATA).is_symlink():
        return path
    if not (path / TRACKER).exists():
        if path.is_dir():
            held = sorted(p.name for p in path.iterdir() if _FOLDER.fullmatch(p.name))
        else:
            held = []
        more = f"; it holds {', '.join(held[:4])}: name one of them" if held else ""
        raise CorruptData(f"{path} has neither {METADATA} nor {TRACKER}{more}")
    text = read_plain(path / TRACKER, 64).decode("utf-8", "replace").strip()
    if not _ITERATION.fullmatch(text) and text != RELEASE:
        raise CorruptData(f"{path / TRACKER} names no iteration: {text[:40]!r}")
    found = path / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    # a link may lead to files that nobody meant to convert
    if found.is_symlink():
        raise CorruptData(
            f"{path / TRACKER} says {text}, and {found} is a link, and none is followed"
        )
    if not (found / METADATA).exists():
        raise CorruptData(f"{path / TRACKER} says {text}, and {found} is no folder with {METADATA}")
    return found


def _check_backend(path: Path) -> None:
    if not (path / BACKEND).exists():
        return
    try:
        found = json.loads(read_plain(path / BACKEND, 1 << 16))
        backend = found["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptData(f"{path / BACKEND} does not say the backend of the checkpoint") from None
    if backend != "torch_dist":
        raise CorruptData(
            f"{path / BACKEND}: the backend is {_shown(backend)}; only torch_dist is read"
        )


def _shown(value: Any) -> str:
    """Return a text or a number; of anything else, which may unfold without end, its kind."""
    if isinstance(value, str):
        return repr(value[:200])
    if type(value) is int:
        return str(value)
    return type(value).__name__


class _Reading:
    """A reader of `.metadata`."""

    def __init__(self, path: Path, top: Any) -> None:
        self.path = path
        self.top = top
        self.where = str(path / METADATA)
        self.sizes: dict[str, int] = {}

    def refused(self, why: str) -> CorruptData:
        return CorruptData(f"{self.where}: {why}")

    def checkpoint(self, is_weight: Callable[[str], bool]) -> TorchDist:
        """Return all tensors; chunks of weights."""
        if not isinstance(self.top, Record) or self.top.name not in _TOP:
            raise self.refused("it is no metadata of torch.distributed.checkpoint")
        fields = self.fields(self.top)
        places = self.places(fields.get("storage_data"))
        # before any tensor: shared bytes would be two weights from one
        self.check_apart(places)
        out = dict[str, Stored]()
        objects = 0
        for name, value in self.pairs(fields.get("state_dict_metadata"), "state_dict_metadata"):
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name in out:
                raise self.refused(f"a name is invalid, or occurs twice: {_shown(name)}")
            if not isinstance(value, Record) or not value.name.startswith(f"{_TORCH}.metadata."):
                raise self.refused(f"{name[:200]} is nothing that a checkpoint holds")
            if value.name.endswith(".BytesStorageMetadata"):
                objects += 1
            else:
                out[name] = self.tensor(
                    name, self.fields(value), places if is_weight(name) else None
                )
        kept = places.get((_COMMON, None))
        common = Chunk((), (), self.path / kept[0], *kept[1:]) if kept is not None else None
        return TorchDist(self.path, out, objects, common)

    def fields(self, record: Record) -> dict[str, Any]:
        """Return the fields of a record, whose state is a dict with texts as keys."""
        return dict(self.pairs(record.state, record.name.rpartition(".")[2], str))

    def pairs(self, value: Any, what: str, kind: type = object) -> Iterator[tuple[Any, Any]]:
        if not isinstance(value, Mapped) or not all(
            isinstance(key, kind) for key, _ in value.pairs
        ):
            raise self.refused(f"{what} is no dict of what it should hold")
        yield from value.pairs

    def numbers(self, value: Any, what: str) -> tuple[int, ...]:
        """Return a `torch.Size`, or a plain list of sizes."""
        if isinstance(value, Record) and value.name == _SIZE and len(value.arguments) == 1:
            (value,) = value.arguments
        if not isinstance(value, tuple | list) or not all(
            type(n) is int and 0 <= n < _LARGEST for n in value
        ):
            raise self.refused(f"{what[:200]} has a shape or an offset that cannot be")
        if len(value) > MAX_DIMENSIONS:
            raise self.refused(f"{what[:200]} has {len(value)} dimensions")
        return tuple(value)

    def places(self, value: Any) -> dict[tuple[str, Any], tuple[str, int, int]]:
        """Return file, first byte and length of every chunk, by name and offset."""
        out: dict[tuple[str, Any], tuple[str, int, int]] = {}
        for key, info in self.pairs(value, "storage_data", Record):
            place, found = self.place(key, info)
            if place in out:
                raise self.refused(f"a chunk of {place[0][:200]} is stored twice")
            out[place] = found
        return out

    def place(self, key: Record, info: Any) -> tuple[tuple[str, Any], tuple[str, int, int]]:
        """Return name and offset of a chunk, and its place."""
        if not isinstance(info, Record) or not key.name.endswith(".MetadataIndex"):
            raise self.refused("storage_data does not say where chunks are")
        index = self.fields(key)
        found = self.fields(info)
        name = index.get("fqn")
        offset = index.get("offset")
        if not isinstance(name, str):
            raise self.refused("a chunk belongs to no tensor")
        place = (name, self.numbers(offset, name) if offset is not None else None)
        file, start, length = (found.get(word) for word in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _PLAIN.fullmatch(file):
            raise self.refused(f"{_shown(file)} is no plain name of a .distcp file")
        if found.get("transform_descriptors"):
            raise self.refused(f"{name[:200]} is compressed or transformed, which is not read")
        if not (
            type(start) is int
            and type(length) is int
            and 0 <= start < _LARGEST
            and 0 < length < _LARGEST
        ):
            raise self.refused(
                f"{name[:200]} begins at byte {_shown(start)} and has {_shown(length)} bytes, which"
                " cannot be"
            )
        return place, (file, start, length)

    def check_apart(self, places: Mapping[Any, tuple[str, int, int]]) -> None:
        """Check that no byte belongs to two chunks."""
        by_file = defaultdict(list)
        for (name, _), (file, start, length) in places.items():
            by_file[file].append((start, start + length, name))
        for file, ranges in by_file.items():
            for (_, stop, one), (start, _, other) in pairwise(sorted(ranges)):
                if start < stop:
                    raise self.refused(
                        f"{one[:200]} and {other[:200]} have bytes of {file} in common"
                    )

    def tensor(
        self, name: str, fields: Mapping[str, Any], places: Mapping[Any, Any] | None
    ) -> Stored:
        """Return a tensor; with `places`, its chunks."""
        kind = self.dtype(name, fields.get("properties"))
        shape = self.numbers(fields.get("size"), name)
        if places is None:
            return Stored(name, kind, shape, ())
        listed = fields.get("chunks")
        if not isinstance(listed, list) or len(listed) > len(places):
            raise self.refused(f"{name[:200]} has other chunks than those that are stored")
        chunks = tuple(self.chunk(name, one, BYTES[kind], places) for one in listed)
        self.check_covered(name, shape, chunks)
        return Stored(name, kind, shape, chunks)

    def dtype(self, name: str, properties: Any) -> str:
        state = properties.state if isinstance(properties, Record) else None
        first = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(first, Name) or first.text not in DTYPES:
            shown = first.text if isinstance(first, Name) else "none that is known"
            raise self.refused(f"the number format of {name[:200]} is {shown}")
        return DTYPES[first.text]

    def chunk(self, name: str, value: Any, width: int, places: Mapping[Any, Any]) -> Chunk:
        if not isinstance(value, Record) or not value.name.endswith(".ChunkStorageMetadata"):
            raise self.refused(f"{name[:200]} has an invalid chunk")
        fields = self.fields(value)
        offset, shape = (self.numbers(fields.get(word), name) for word in ("offsets", "sizes"))
        if (name, offset) not in places:
            raise self.refused(
                f"it does not say where the chunk of {name[:200]} at {list(offset)} is"
            )
        file, start, length = places[name, offset]
        # once for each file, which holds many chunks
        if file not in self.sizes:
            with open_plain(self.path / file) as opened:
                self.sizes[file] = opened.seek(0, 2)
        if start + length > self.sizes[file]:
            end = (
                f"{name[:200]} ends at byte {start + length} of {file}, which has"
                f" {self.sizes[file]}"
            )
            raise self.refused(end)
        if prod(shape) * width > length:
            raise self.refused(
                f"a chunk of {name[:200]} has shape {list(shape)}, and {length} bytes"
            )
        return Chunk(offset, shape, self.path / file, start, length)

    def check_covered(self, name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
        """Check that every number of a tensor is in exactly one chunk.

        The corners of boxes, each with the sign of its place in its box, cancel but for the corners
        of the whole if and only if the boxes fill the whole once.
        """
        corners: dict[tuple[int, ...], int] = defaultdict(int)
        boxes = [((0,) * len(shape), shape, -1), *((c.offset, c.shape, 1) for c in chunks)]
        for offset, size, sign in boxes:
            if len(offset) != len(shape) or len(size) != len(shape) or 0 in size:
                raise self.refused(
                    f"{name[:200]} of shape {list(shape)} has a chunk of shape {list(size)}"
                )
            for ends in product((0, 1), repeat=len(shape)):
                corner = tuple(o + n * end for o, n, end in zip(offset, size, ends, strict=True))
                # as in inclusion and exclusion
                corners[corner] += sign * (-1) ** sum(ends)
        if any(corners.values()):
            raise self.refused(
                f"the chunks of {name[:200]} do not fill its shape {list(shape)} once"
            )
