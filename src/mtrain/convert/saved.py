"""The tensors of a checkpoint of ours as words, read without torch; what is read is compared with its hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.ckpt import hashes
from mtrain.ckpt.folder import MODEL, read_manifest
from mtrain.ckpt.pieces import Piece, assemble
from mtrain.convert.match import Box
from mtrain.convert.tensor_file import Tensor, read_header
from mtrain.convert.words import IN_SAFETENSORS, Words, buffer_of, empty
from mtrain.errors import CorruptData

MAIN = "optim/main_weight/"
"""What a checkpoint calls the weights in fp32 from which the model's own, in half precision, are rounded."""


@dataclass
class Saved:
    """A committed checkpoint, opened."""

    path: Path
    manifest: dict[str, Any]
    _files: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Saved:
        """Read the manifest.

        Raises:
            CorruptData: no manifest, one that is cut or altered, or a file that is missing or altered, by name.
        """
        return cls(path, read_manifest(path, verify=False))

    def key(self, key: str, *, main: bool = False) -> str:
        """The name of a weight among its tensors; with `main`, of its main weights where it has them."""
        tensors = self.manifest["tensors"]
        return f"{MAIN}{key}" if main and f"{MAIN}{key}" in tensors else f"{MODEL}{key}"

    def dtype(self, name: str) -> str:
        """Number format of a tensor."""
        return IN_SAFETENSORS[self.manifest["tensors"][name]["dtype"]]

    def read(self, name: str, box: Box) -> tuple[Words, str]:
        """A box of a tensor without its counting axes, and its hex sha256 where it is one piece; else an empty text.

        Raises:
            CorruptData: there is no such tensor, or it has another shape, or its pieces are not as they were written.
        """
        entry = self.manifest["tensors"].get(name)
        if entry is None or tuple(entry["shape"]) != box.global_shape:
            said = f"no tensor {name}" if entry is None else f"{name} in shape {entry['shape']}"
            raise CorruptData(f"{self.path} has {said}; it should be {list(box.global_shape)}")
        for piece in entry["pieces"]:
            if (tuple(piece["offset"]), tuple(piece["shape"]), piece["flat"]) == (box.offset, box.size, None):
                sha256 = hashes.header(self.path / piece["file"]).hashes.get(piece["entry"], "")
                return self._piece(piece).reshape(box.shape), sha256
        out = empty(box.size, self.dtype(name))
        what = f"{self.path}: the pieces of {name}"
        assemble(out, box.offset, entry["pieces"], self._piece, np.concatenate, what)
        return out.reshape(box.shape), ""

    def _piece(self, piece: Piece) -> Words:
        file, path = piece["file"], self.path / piece["file"]
        if file not in self._files:
            if file not in self.manifest["files"]:
                raise CorruptData(f"{path} is none of the checkpoint's files")
            hashes.check_header(path, self.manifest["files"][file])
            self._files[file] = read_header(path)
        if piece["entry"] not in self._files[file]:
            raise CorruptData(f"{path} lacks {piece['entry']}")
        tensor = self._files[file][piece["entry"]]
        words = empty((tensor.nbytes // tensor.width,), tensor.dtype)
        tensor.read_into(buffer_of(words))
        hashes.check_entry(path, piece["entry"], buffer_of(words))
        return words
