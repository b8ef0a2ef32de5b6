"""Tensors of a Hugging Face folder in memory, dequantised where they were stored in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrain.ckpt.hashes import hash_bytes
from mtrain.convert.huggingface.folder import Folder
from mtrain.convert.raw_arrays import RawArray, as_tensor, buffer_of, empty, of_tensor
from mtrain.convert.safetensors_file import Tensor
from mtrain.errors import CorruptData

if TYPE_CHECKING:
    import torch

SCALES = "_scale_inv"
"""Suffix for the factors of the blocks of an fp8 weight (DeepSeek-V3)."""
BLOCKS = "_blocks"
MX_SCALES = "_scales"
"""Suffix for the scales of an mxfp4 weight (GPT-OSS), a power of two for each 32 numbers."""
FP8_BLOCK = 128
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 by their three bits; the fourth is the sign."""


def load(stored: Tensor) -> RawArray:
    """Return a tensor as it is in its file.

    Raises:
        CorruptData: it cannot be read.
    """
    out = empty(stored.shape, stored.dtype)
    stored.read_into(buffer_of(out))
    return out


@dataclass
class Reader:
    """The weights of a folder by a table's names, with a hash of everything read."""

    folder: Folder

    def __post_init__(self) -> None:
        self.hashes: dict[str, str] = {}
        held = self.folder.tensors
        self._fp8 = {n for n in held if held[n].dtype.startswith("F8") and f"{n}{SCALES}" in held}
        self._fp4 = {n.removesuffix(BLOCKS) for n in held if n.endswith(BLOCKS)}
        self._fp4 = {n for n in self._fp4 if f"{n}{MX_SCALES}" in held}
        parts = {f"{n}{SCALES}" for n in self._fp8} | {
            f"{n}{e}" for n in self._fp4 for e in (BLOCKS, MX_SCALES)
        }
        # of experts that a configuration has none of
        empty = {n for n in held if 0 in held[n].shape}
        self.names = frozenset({*held, *self._fp4} - parts - empty)
        """Names of weights that hold a number, each once."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the tensors of the files that a weight is made of."""
        if name in self._fp8:
            return name, f"{name}{SCALES}"
        return (f"{name}{BLOCKS}", f"{name}{MX_SCALES}") if name in self._fp4 else (name,)

    def dtype(self, name: str) -> str:
        """Return the number format of a weight in memory."""
        return "BF16" if self.decoding(name) else self.folder.tensors[name].dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes of a weight in memory: bf16 for fp8, two numbers a byte for mxfp4."""
        stored = self.folder.tensors[self.parts(name)[0]].nbytes
        if name in self._fp8:
            return 2 * stored
        if name in self._fp4:
            return 4 * stored
        return stored

    def decoding(self, name: str) -> str:
        """Return how a weight is decoded from its parts, or "" if it is one tensor."""
        if name in self._fp8:
            return "fp8 times its blocks' factors"
        if name in self._fp4:
            return "mxfp4"
        return ""

    def tensor(self, name: str) -> RawArray:
        """Return a weight; torch dequantises weights stored in fewer bits to bf16.

        Raises:
            CorruptData: it cannot be read, or its parts do not fit together.
        """
        parts = [self._part(part) for part in self.parts(name)]
        if not self.decoding(name):
            return parts[0]
        tensors = [
            as_tensor(p, self.folder.tensors[n].dtype)
            for p, n in zip(parts, self.parts(name), strict=True)
        ]
        return of_tensor(
            _of_fp8(name, *tensors) if name in self._fp8 else _of_mxfp4(name, *tensors)
        )[0]

    def hash_of(self, name: str) -> str:
        """Return the hex sha256 of a weight that was read; empty if it was assembled."""
        return "" if self.decoding(name) else self.hashes[name]

    def _part(self, name: str) -> RawArray:
        tensor = load(self.folder.tensors[name])
        # a tensor may be read twice: for its step, and as a copy
        if name not in self.hashes:
            self.hashes[name] = hash_bytes(buffer_of(tensor))
        return tensor


def _of_fp8(name: str, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    # blocks at the edges may be narrower
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape) if weight.ndim == 2 else (0, 0)
    if tuple(factors.shape) != (rows, columns):
        raise CorruptData(
            f"{name}{SCALES} has shape {list(factors.shape)}, and {name} {list(weight.shape)}"
        )
    whole = factors.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * whole[: weight.shape[0], : weight.shape[1]]).bfloat16()


def _of_mxfp4(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `blocks` [..., n, groups, 16] times `scales` as [..., groups * 32, n]."""
    import torch

    bytes_only = blocks.dtype == scales.dtype == torch.uint8
    if not bytes_only or blocks.ndim < 3 or blocks.shape[:-1] != scales.shape:
        raise CorruptData(f"{name}{BLOCKS} and {name}{MX_SCALES} do not fit together")
    *experts, n, groups, width = blocks.shape
    values: Any = torch.tensor([*FP4, *(-value for value in FP4)])
    out = torch.empty(*experts, 2 * groups * width, n, dtype=torch.bfloat16)
    each = (
        blocks.reshape(-1, n, groups, width),
        scales.reshape(-1, n, groups),
        out.view(-1, *out.shape[-2:]),
    )
    for block, scale, place in zip(*each, strict=True):  # in full width one expert at a time
        # the low half of a byte is the first number
        pairs = torch.stack([block & 0x0F, block >> 4], -1).flatten(-2)
        # a scale is an exponent of two with a bias of 127, so that nothing is rounded
        exact = torch.ldexp(values[pairs.int()], (scale.int() - 127).unsqueeze(-1))
        place.copy_(exact.flatten(-2).mT)
    return out
