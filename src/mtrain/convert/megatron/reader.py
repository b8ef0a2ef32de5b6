"""Weights of a checkpoint of megatron-core in memory, a layer or an expert at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtrain.ckpt.hashes import hash_bytes
from mtrain.convert.megatron.saved_tensor import numbers_of
from mtrain.convert.megatron.torch_dist import Chunk, Stored, TorchDist
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
    """A tensor of a checkpoint, or of one that counts layers or experts along its first axes a
    place there.
    """

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
    """The weights of a checkpoint by their one name each; remembers a hash of everything that it
    read.
    """

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
            # megatron-core stores gate and up of SwiGLU apart, and a weight of ours has both
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
            CorruptData: it cannot be read, or what holds it twice does not hold the same.
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
        """Return a weight of its one part, or of its gate and what is gated."""
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
        """Yield the chunks that hold a part: those of its own place, and those that
        span several.
        """
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
    """Fill what a chunk holds of `box`, which lies at `offset` in the tensor; no more of the chunk
    is read.
    """
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
