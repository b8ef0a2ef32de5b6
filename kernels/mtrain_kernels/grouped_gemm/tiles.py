"""Tile sizes of a grouped product: a small table, from which the measured fastest is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels import tuning
from mtrain_kernels.runtime import capability, power_of_two


@dataclass(frozen=True)
class Tile:
    """Sides of a tile, and how many warps and stages work on it; `tma`: operands come by TMA
    descriptors (sm_90).
    """

    rows: int
    n: int
    k: int
    warps: int = 8
    stages: int = 4
    tma: bool = False

    @property
    def name(self) -> str:
        """Return the tile's name in a record."""
        return (
            f"{self.rows}x{self.n}x{self.k} w{self.warps}"
            f" s{self.stages}{' tma' if self.tma else ''}"
        )

    def descriptor(self, x: Tensor, block: list[int]) -> Any:
        """Return a TMA descriptor of a dense matrix, also of one row, whose stride may be any."""
        return self.described(x, list(x.shape), [x.shape[1], 1], block)

    @staticmethod
    def described(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
        """Return a TMA descriptor of memory that begins where `x` does."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(x, shape, strides, block)


_MORE = (
    Tile(128, 256, 64, stages=3, tma=True),
    Tile(64, 128, 64, warps=4, stages=4, tma=True),
    Tile(128, 128, 64),
    Tile(64, 128, 64, warps=4),
)
TABLES = {
    "rows": (Tile(128, 128, 64, tma=True), *_MORE),
    "turned": (Tile(128, 128, 64, stages=3, tma=True), *_MORE),
    "gated": (
        Tile(128, 64, 64, stages=3, tma=True),
        Tile(128, 128, 64, stages=3, tma=True),
        Tile(64, 64, 64, warps=4, stages=4, tma=True),
        Tile(128, 64, 64),
        Tile(64, 64, 64, warps=4),
    ),
    "weights": (
        Tile(64, 128, 128, stages=3, tma=True),
        Tile(64, 128, 256, stages=3, tma=True),
        Tile(64, 128, 128),
        Tile(32, 128, 128),
    ),
}
"""Candidate tiles of each product; the first that can run is the default without measurements.

`rows` multiplies with weights, `turned` with transposed ones, `gated` makes an activation,
`weights` a gradient.
"""

LEAST = 64  # sizes from which descriptors are worth their while
EXACT = {
    "rows": Tile(64, 64, 32),
    "turned": Tile(64, 64, 32),
    "gated": Tile(64, 32, 32),
    "weights": Tile(32, 64, 64),
}
"""fp32 without tensor cores."""


def candidates(product: str, x: Tensor, descriptors: bool) -> list[Tile]:
    """Return the tiles of the table that can run on `x`; `descriptors`: whether TMA may read the
    memory next to it.
    """
    # Rows that a descriptor reads are multiples of 16 bytes.
    tma = descriptors and capability(x.device) >= 90 and x.shape[-1] * x.element_size() % 16 == 0
    found = [tile for tile in TABLES[product] if tma or not tile.tma]
    return found if x.dtype != torch.float32 else [EXACT[product]]


def tile_for(
    product: str, x: Tensor, rows: int, n: int, k: int, groups: int, descriptors: bool
) -> Tile:
    """Return the tile of a product of `TABLES`: the fastest measured one for this class of shapes,
    or the first.

    The choice depends on the device, the dtype, the sizes and the recorded measurements, not
    on timing.
    """
    descriptors = descriptors and min(n, k) >= LEAST and (x.is_meta or x.data_ptr() % 16 == 0)
    found = candidates(product, x, descriptors)
    wanted = tuning.recorded(f"grouped_gemm.{product}", shape_class(x, rows, n, k, groups))
    tile = next((tile for tile in found if tile.name == wanted), found[0])
    if tile.tma:
        return tile
    # Small sizes get small tiles; those by descriptors stay as they were measured.
    sides = _side(rows, tile.rows), _side(n, tile.n), _side(k, tile.k)
    return Tile(*sides, warps=tile.warps, stages=tile.stages)


def shape_class(x: Tensor, rows: int, n: int, k: int, groups: int) -> str:
    """Return the class of shapes that are tuned together: sizes of the layer exactly, rows of a
    group by powers of two.
    """
    return (
        f"{str(x.dtype).removeprefix('torch.')} n{n} k{k} g{groups} r{power_of_two(rows // groups)}"
    )


def _side(size: int, most: int) -> int:
    return min(max(power_of_two(size), 16), most)  # a tensor core takes no fewer than 16
