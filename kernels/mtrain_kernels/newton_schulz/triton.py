"""The product of matrices with their own transposes: tiles on and below the diagonal, and their
mirror images.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import GRID, INTERPRETED, cast, ceil_div, on_device_of

TILE = 128
"""Rows and columns of a tile."""
STEP = 64
"""Columns of X that are multiplied at once."""


@triton.jit
def _lower(tile):
    """Return the row and column of the tile with this number, where the tiles on and below the
    diagonal are counted by rows.
    """
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    # the root of a large number is rounded
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    return row, tile - row * (row + 1) // 2


@kernel
def symmetric_kernel(
    x_ptr, added_ptr, y_ptr, m, k, alpha, beta,
    ADDED: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of `alpha X X^T + beta C` of one matrix, and its mirror image across the
    diagonal.
    """
    row, column = _lower(tl.program_id(0))
    matrix = tl.program_id(1).to(tl.int64)
    r = row * TILE + tl.arange(0, TILE)
    c = column * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, STEP)
    x_ptr += matrix * m * k
    left = x_ptr + r.to(tl.int64)[:, None] * k + inner[None, :]
    right = x_ptr + c.to(tl.int64)[None, :] * k + inner[:, None]
    total = tl.zeros((TILE, TILE), tl.float32)
    for i in range(0, k, STEP):
        if EVEN:
            a = tl.load(left + i, mask=(r < m)[:, None], other=0.0)
            b = tl.load(right + i, mask=(c < m)[None, :], other=0.0)
        else:
            here = i + inner < k
            a = tl.load(left + i, mask=(r < m)[:, None] & here[None, :], other=0.0)
            b = tl.load(right + i, mask=(c < m)[None, :] & here[:, None], other=0.0)
        if INTERPRETED:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        elif EXACT:
            # fp32 proper, without TF32.
            total = tl.dot(a, b, total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total)
    total *= alpha
    inside = (r < m)[:, None] & (c < m)[None, :]
    place = matrix * m * m + r.to(tl.int64)[:, None] * m + c[None, :]
    if ADDED:
        total += beta * tl.load(added_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = cast(total, y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=inside)
    if row != column:
        turned = matrix * m * m + c.to(tl.int64)[:, None] * m + r[None, :]
        tl.store(y_ptr + turned, tl.trans(y), mask=(c < m)[:, None] & (r < m)[None, :])


def symmetric_product(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Launch the kernel on `x` [b, m, k] and `added` [b, m, m] or None; see
    `reference.symmetric_product`.
    """
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    b, m, k = x.shape
    y = x.new_empty((b, m, m))
    exact = x.dtype == torch.float32
    tile, step = (TILE // 2, STEP // 2) if exact else (TILE, STEP)
    tiles = ceil_div(m, tile)
    # The matrices are the second axis of the grid, whose length is limited.
    for first in range(0, b if m else 0, GRID):
        part = slice(first, first + GRID)
        with on_device_of(x):
            symmetric_kernel[(tiles * (tiles + 1) // 2, min(b - first, GRID))](
                x[part], None if added is None else added[part], y[part], m, k, alpha, beta,
                ADDED=added is not None, EVEN=k % step == 0, EXACT=exact, TILE=tile, STEP=step,
                num_warps=8, num_stages=3,
            )  # fmt: skip
    return y
