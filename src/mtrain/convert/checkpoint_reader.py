"""The tensors of our checkpoint as words, read without torch and compared with their hashes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.ckpt import hashes
from mtrain.ckpt.folder import MODEL, read_manifest
from mtrain.ckpt.index import Index
from mtrain.ckpt.pieces import Piece, Region, parts
from mtrain.convert.match import Box
from mtrain.convert.raw_arrays import IN_SAFETENSORS, RawArray, empty
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData

MAIN = "optim/main_weight/"
"""Prefix of the fp32 weights of which a checkpoint's half-precision weights are rounded copies."""
READ_BYTES = 16 << 20
"""The most that is read at once where a box is put together."""


@dataclass
class CheckpointReader:
    """A committed checkpoint, opened."""

    path: Path
    manifest: dict[str, Any]

    @cached_property
    def _files(self) -> hashes.Files:
        return hashes.Files(self.path, self.manifest["files"], once=True)

    @cached_property
    def _index(self) -> Index:
        return Index(self.path, self.manifest)

    @classmethod
    def open(cls, path: Path) -> CheckpointReader:
        """Read the manifest.

        Raises:
            CorruptData: no manifest, one that is cut or altered, or a file that is missing or
                altered, by name.
        """
        # pieces are hashed as they are read: hashing first would read everything twice
        return cls(path, read_manifest(path, verify=False))

    def key(self, key: str, *, main: bool = False) -> str:
        """Return a weight's name among its tensors; with `main`, of its main weights if any."""
        tensors = self.manifest["tensors"]
        return f"{MAIN}{key}" if main and f"{MAIN}{key}" in tensors else f"{MODEL}{key}"

    def dtype(self, name: str) -> str:
        """Return the number format of a tensor."""
        return IN_SAFETENSORS[self.manifest["tensors"][name]["dtype"]]

    def read(self, name: str, box: Box) -> tuple[RawArray, str]:
        """Return a box of a tensor without its counting axes, and its hex sha256 where it is one
        piece; else an empty text.

        Raises:
            CorruptData: the tensor is missing, has another shape, or its pieces have changed.
        """
        entry = self.manifest["tensors"].get(name)
        if entry is None or tuple(entry["shape"]) != box.global_shape:
            held = f"no tensor {name}" if entry is None else f"{name} in shape {entry['shape']}"
            raise CorruptData(f"{self.path} has {held}; it should be {list(box.global_shape)}")
        # the usual case: one rank wrote the whole box, and its stored hash is that of the tensor
        wanted = Region(box.offset, box.size)
        pieces = self._index.pieces(name, wanted)
        for piece in pieces:
            if (tuple(piece["offset"]), tuple(piece["shape"]), piece["flat"]) == (
                box.offset,
                box.size,
                None,
            ):
                sha256 = self._files[piece["file"]].entry(piece["entry"]).sha256
                return self._words(piece, 0, prod(box.size)).reshape(box.shape), sha256
        out = empty(box.size, self.dtype(name))
        flat = out.reshape(-1)
        what = f"{self.path}: the pieces of {name}"
        for part in parts(wanted, pieces, READ_BYTES // out.itemsize, what):
            found = self._words(part.piece, part.start, part.stop)
            _strided(flat[part.at :], part.shape, part.here)[...] = _strided(
                found, part.shape, part.there
            )
        return out.reshape(box.shape), ""

    def _words(self, piece: Piece, start: int, stop: int) -> RawArray:
        """Read elements [start, stop) of a piece."""
        shard = self._files[piece["file"]]
        held = shard.entry(piece["entry"])
        width = BYTES.get(held.dtype, 0)
        # the shard may differ from the manifest's description
        if not width or not start <= stop <= prod(held.shape):
            raise CorruptData(f"{shard.name}: {piece['entry']} is {held.dtype} {list(held.shape)}")
        # only the blocks that hold these elements are read and hashed
        data = shard.read(piece["entry"], start * width, stop * width)
        return np.frombuffer(data, dtype=empty((0,), held.dtype).dtype)


def _strided(words: RawArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> RawArray:
    return np.lib.stride_tricks.as_strided(
        words, shape, [stride * words.itemsize for stride in strides]
    )
