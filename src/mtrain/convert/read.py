"""Tensors of a Hugging Face folder in memory: as they are, or put together where they were stored in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mtrain.ckpt.hashes import hash_bytes
from mtrain.convert.folder import Folder
from mtrain.convert.tensor_file import Tensor
from mtrain.errors import CorruptData

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALES = "_scale_inv"
"""Behind the name of an fp8 weight: that of the factors of its blocks (DeepSeek-V3)."""
BLOCKS, MX_SCALES = "_blocks", "_scales"
"""Behind the name of an mxfp4 weight: its numbers, two a byte, and a power of two for 32 of them (GPT-OSS)."""
FP8_BLOCK = 128
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 by their three bits; the fourth is the sign."""


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(flat)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit by bit."""
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def load(stored: Tensor) -> torch.Tensor:
    """A tensor as it is in its file.

    Raises:
        CorruptData: it cannot be read.
    """
    out = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    stored.read_into(buffer_of(out))
    return out


@dataclass
class Reader:
    """The weights of a folder by the names that a table has for them; remembers a hash of everything that it read."""

    folder: Folder

    def __post_init__(self) -> None:
        self.hashes: dict[str, str] = {}
        held = self.folder.tensors
        self._fp8 = {n for n in held if held[n].dtype.startswith("F8") and f"{n}{SCALES}" in held}
        self._fp4 = {n.removesuffix(BLOCKS) for n in held if n.endswith(BLOCKS)}
        self._fp4 = {n for n in self._fp4 if f"{n}{MX_SCALES}" in held}
        parts = {f"{n}{SCALES}" for n in self._fp8} | {f"{n}{e}" for n in self._fp4 for e in (BLOCKS, MX_SCALES)}
        self.names = frozenset({*held, *self._fp4} - parts)
        """Of weights, each once."""

    def parts(self, name: str) -> tuple[str, ...]:
        """The tensors of the files that a weight is made of."""
        if name in self._fp8:
            return name, f"{name}{SCALES}"
        return (f"{name}{BLOCKS}", f"{name}{MX_SCALES}") if name in self._fp4 else (name,)

    def dtype(self, name: str) -> torch.dtype:
        """Of what `tensor` gives."""
        return torch.bfloat16 if self.decoding(name) else DTYPES[self.folder.tensors[name].dtype]

    def decoding(self, name: str) -> str:
        """How a weight is made of its parts; empty where it is one."""
        return "fp8 times its blocks' factors" if name in self._fp8 else "mxfp4" if name in self._fp4 else ""

    def tensor(self, name: str) -> torch.Tensor:
        """A weight; what was stored in fewer bits comes in bf16.

        Raises:
            CorruptData: it cannot be read, or its parts do not fit together.
        """
        parts = [self._part(part) for part in self.parts(name)]
        if name in self._fp8:
            return _of_fp8(name, *parts)
        return _of_mxfp4(name, *parts) if name in self._fp4 else parts[0]

    def hash_of(self, name: str) -> str:
        """Hex sha256 of a weight that `tensor` has given; empty where it was put together."""
        return "" if self.decoding(name) else self.hashes[name]

    def _part(self, name: str) -> torch.Tensor:
        tensor = load(self.folder.tensors[name])
        if name not in self.hashes:
            self.hashes[name] = hash_bytes(buffer_of(tensor))
        return tensor


def _of_fp8(name: str, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape) if weight.ndim == 2 else (0, 0)
    if tuple(factors.shape) != (rows, columns):
        raise CorruptData(f"{name}{SCALES} has shape {list(factors.shape)}, and {name} {list(weight.shape)}")
    whole = factors.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * whole[: weight.shape[0], : weight.shape[1]]).bfloat16()


def _of_mxfp4(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes `blocks` [..., n, groups, 16] and exponents `scales` [..., n, groups] as [..., groups * 32, n]."""
    bytes_only = blocks.dtype == scales.dtype == torch.uint8
    if not bytes_only or blocks.ndim < 3 or blocks.shape[:-1] != scales.shape:
        raise CorruptData(f"{name}{BLOCKS} and {name}{MX_SCALES} do not fit together")
    *experts, n, groups, width = blocks.shape
    values: Any = torch.tensor([*FP4, *(-value for value in FP4)])
    out = torch.empty(*experts, 2 * groups * width, n, dtype=torch.bfloat16)
    each = (blocks.reshape(-1, n, groups, width), scales.reshape(-1, n, groups), out.view(-1, *out.shape[-2:]))
    for block, scale, place in zip(*each, strict=True):  # in full width one expert at a time
        pairs = torch.stack([block & 0x0F, block >> 4], -1).flatten(-2)
        exact = torch.ldexp(values[pairs.int()], (scale.int() - 127).unsqueeze(-1))
        place.copy_(exact.flatten(-2).mT)
    return out
