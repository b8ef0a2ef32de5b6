"""Tiles of fused attention: how many queries and keys a kernel takes at once, and how a head's
width is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain_kernels import tuning
from mtrain_kernels.runtime import capability, power_of_two

WIDEST = 256  # of a head


@dataclass(frozen=True)
class Widths:
    """Columns of a tile: of queries and keys in two parts, powers of two, and of values; 192 is 128
    and 64.
    """

    first: int
    second: int
    value: int
    even: bool
    """Both parts are full."""
    even_value: bool

    @classmethod
    def of(cls, size: int, value_size: int) -> Widths:
        """Cut heads of `size` with values of `value_size` into parts of 16 columns or more."""
        # The largest power of two that fits; a rest of its own keeps 192 from being padded to 256.
        first = max(16, power_of_two(size + 1) // 2)
        rest = max(0, size - first)
        second = max(16, power_of_two(rest)) if rest else 0
        value = max(16, power_of_two(value_size))
        return cls(first, second, value, first + second == size, value == value_size)


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and how many warps and stages work on it."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2

    @property
    def name(self) -> str:
        """Return the tile's name in a record."""
        return f"{self.queries}x{self.keys} w{self.warps} s{self.stages}"


TABLES: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("forward", 64): (Tile(128, 64, 8, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("forward", 128): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    ("forward", 192): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    ("forward", 256): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("queries", 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("queries", 128): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("queries", 192): (Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("queries", 256): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("keys", 64): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("keys", 128): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("keys", 192): (Tile(32, 64, 8, 2), Tile(64, 32, 8, 1)),
    ("keys", 256): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 1)),
}
"""Candidate tiles of each pass and head width; the first is the default without measurements.

`forward` and `queries`, which makes their gradient, walk over keys, `keys` over queries.
"""
OLDER: dict[tuple[str, int], Tile] = {
    ("forward", 64): Tile(128, 64, 8, 3),
    ("forward", 128): Tile(128, 64, 8, 3),
    ("forward", 192): Tile(128, 32, 8, 2),
    ("forward", 256): Tile(64, 32, 8, 2),
    ("queries", 64): Tile(128, 64, 8, 2),
    ("queries", 128): Tile(64, 64, 8, 2),
    ("queries", 192): Tile(32, 64, 8, 2),
    ("queries", 256): Tile(32, 32, 8, 1),
    ("keys", 64): Tile(32, 64, 4, 2),
    ("keys", 128): Tile(64, 64, 8, 2),
    ("keys", 192): Tile(64, 32, 8, 1),
    ("keys", 256): Tile(32, 32, 8, 1),
}
"""Tiles of GPUs before sm_90, whose products keep operands in registers."""
EXACT = {"forward": Tile(32, 32, 4, 1), "queries": Tile(32, 32, 4, 1), "keys": Tile(32, 32, 4, 1)}
"""fp32 without tensor cores."""


def candidates(pass_: str, q: Tensor, v: Tensor) -> tuple[Tile, ...]:
    """Return the tiles of the table for heads of this width and dtype."""
    widths = Widths.of(q.shape[-1], v.shape[-1])
    width = max(widths.first + widths.second, widths.value)
    if q.dtype == torch.float32:
        return (EXACT[pass_],)
    key = pass_, next(most for most in (64, 128, 192, WIDEST) if width <= most)
    # The capability is 0 where there is no NVIDIA GPU, as in the interpreter.
    return (OLDER[key],) if 0 < capability(q.device) < 90 else TABLES[key]


def tile_for(pass_: str, q: Tensor, v: Tensor, windowed: bool) -> Tile:
    """Return the tile measured for this class of calls, or the first of the table.

    The choice depends on the device, the dtype, the sizes and the recorded measurements, not
    on timing.
    """
    found = candidates(pass_, q, v)
    wanted = tuning.recorded(f"attention.{pass_}", shape_class(q, v, windowed))
    return next((tile for tile in found if tile.name == wanted), found[0])


def shape_class(q: Tensor, v: Tensor, windowed: bool) -> str:
    """Return the class of calls that are tuned together: widths of a head exactly, queries by
    powers of two, with or without a window.
    """
    sizes = f"d{q.shape[-1]} e{v.shape[-1]} s{power_of_two(q.shape[2])}"
    return f"{str(q.dtype).removeprefix('torch.')} {sizes}{' window' if windowed else ''}"
