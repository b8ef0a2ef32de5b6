"""The choice for a chunk's logits and row statistics: cuBLAS and a pass after it, or one kernel.

Counted for an H200 at 8,192 tokens of a vocabulary V = 128,256 and hidden states of 4,096 in bf16:
a product takes 10.9 ms, and the pass of statistics reads 2.1 GB in 0.49 ms, in which
multiprocessors issue about as long as memory moves. One kernel saves the reading, not the issuing,
unless another tile is multiplied meanwhile: it is faster only where its product is within 4% of
cuBLAS'. Without writing logits it saves 0.98 ms, 9% of that product, but gradients would need them
a second time, which is 10.9 ms more. So logits are written once where gradients follow, by cuBLAS
unless this kernel was measured to be faster; where none follow, nothing is written, and a chunk
needs hardly any memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain_kernels import tuning
from mtrain_kernels.runtime import capability, power_of_two


@dataclass(frozen=True)
class Tile:
    """Tokens, columns and hidden features of a tile, and how many warps and stages work on it."""

    tokens: int
    columns: int
    step: int
    warps: int = 8
    stages: int = 3

    @property
    def name(self) -> str:
        """Return the tile's name in a record."""
        return f"{self.tokens}x{self.columns}x{self.step} w{self.warps} s{self.stages}"


@dataclass(frozen=True)
class Apart:
    """A product by cuBLAS, and a pass over its logits."""

    name: str = "apart"


APART = Apart()
TILES = (Tile(128, 128, 64), Tile(128, 128, 64, stages=4))
OLDER = (Tile(128, 128, 32), Tile(64, 128, 32, 4))
"""Tiles of GPUs before sm_90, whose products keep operands in registers."""
EXACT = (Tile(32, 64, 32, 4, 2),)
"""fp32 without tensor cores."""


def candidates(hidden: Tensor, kept: bool) -> tuple[Tile | Apart, ...]:
    """Return the ways for hidden states of this dtype and device, whether logits are kept or not;
    the first one is taken where nothing was measured.
    """
    if hidden.dtype == torch.float32:
        return (APART, *EXACT)
    tiles = OLDER if 0 < capability(hidden.device) < 90 else TILES
    return (APART, *tiles) if kept else (*tiles, APART)


def way_for(hidden: Tensor, columns: int, kept: bool) -> Tile | Apart:
    """Return the way measured for this class of calls, or the first of the table.

    The choice depends on the device, the dtype, the sizes and the recorded measurements, not
    on timing.
    """
    found = candidates(hidden, kept)
    wanted = tuning.recorded(kernel_of(kept), shape_class(hidden, columns))
    return next((way for way in found if way.name == wanted), found[0])


def kernel_of(kept: bool) -> str:
    """Return the name that measurements are recorded under."""
    return f"linear_cross_entropy.{'kept' if kept else 'alone'}"


def shape_class(hidden: Tensor, columns: int) -> str:
    """Return the class of calls that are tuned together: the width exactly, columns by powers of
    two.
    """
    return f"{str(hidden.dtype).removeprefix('torch.')} h{hidden.shape[1]} v{power_of_two(columns)}"
