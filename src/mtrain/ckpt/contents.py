"""The files that a rank adds to a checkpoint: descriptions of them, and their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtrain.ckpt import hashes
from mtrain.ckpt.shard_file import Entry, ShardFile
from mtrain.mcore.state.sharding import TensorShard

IN_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Number format as safetensors names it -> as torch does."""
IN_FILE = {dtype: name for name, dtype in IN_TORCH.items()}
OWN = "rank/"
"""Prefix of the entries that only one rank saves."""


@dataclass(frozen=True)
class Contents:
    """A file and the tensors of its entries: those of `changing` come first."""

    file: ShardFile
    changing: tuple[torch.Tensor, ...]
    """Tensors that may change at any time: generators, and the buffers of the model."""
    still: tuple[torch.Tensor, ...]
    """Tensors that change only in the next update: weights, and the state of the optimizer."""

    @classmethod
    def of(
        cls,
        name: str,
        shards: Iterable[TensorShard],
        extra: Mapping[str, torch.Tensor] | None = None,
        algorithm: hashes.Algorithm = hashes.XXH3,
    ) -> Contents:
        """Describe the file `name` with this rank's primary shards, and `extra` tensors that only
        this rank has; `algorithm` hashes its blocks.
        """
        own = [shard for shard in shards if shard.primary]
        own.sort(key=_is_still)
        entries: list[Entry] = []
        pieces: list[dict[str, Any]] = []
        tensors: list[torch.Tensor] = []
        for key, value in (extra or {}).items():
            entries.append(_entry(f"{OWN}{key}", value))
            tensors.append(value)
        for shard in own:
            entry = _entry(f"{shard.key}@{len(pieces)}", shard.tensor)
            entries.append(entry)
            tensors.append(shard.tensor.detach())
            pieces.append(
                {
                    "key": shard.key,
                    "global_shape": list(shard.global_shape),
                    "dtype": str(shard.tensor.dtype).removeprefix("torch."),
                    "offset": list(shard.offset),
                    "shape": list(shard.shape),
                    "flat": list(shard.flat) if shard.flat else None,
                    "file": name,
                    "entry": entry.name,
                }
            )
        first = len(tensors) - sum(map(_is_still, own))
        file = ShardFile(name, tuple(entries), tuple(pieces), algorithm)
        return cls(file, tuple(tensors[:first]), tuple(tensors[first:]))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return self.file.nbytes


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as row-major bytes, uint8 [n], in the same memory if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def on_host(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory; those of a tensor on the host are not copied."""
    return flat_bytes(tensor.cpu()).numpy().data


def _is_still(shard: TensorShard) -> bool:
    return shard.param is not None or not shard.key.startswith("model/")


def _entry(name: str, tensor: torch.Tensor) -> Entry:
    nbytes = tensor.numel() * tensor.element_size()
    return Entry(name, IN_FILE[tensor.dtype], tuple(tensor.shape), nbytes)
