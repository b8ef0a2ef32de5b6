"""A product of operands in FP8 on a GPU: tensor cores add up 128 products, fp32 registers the
scaled sums of them.

Sums of tensor cores keep 14 bits in FP8 on sm_90, which a long sum would lose (DeepSeek-V3,
arXiv:2412.19437, 3.3.2).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from mtrain_kernels.fp8_linear.reference import rows_of
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import INTERPRETED, cast, ceil_div, on_device_of

TILE = 128
GROUP = 8  # tiles of rows that run side by side, so that operands are read from the cache


@kernel
def scaled_product_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, y_ptr, m, n, k, a_row, b_row, y_row, a_blocks,
    b_blocks, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product; `ROWS` of an operand share a scale for each 128 columns, 0:
    one is for all. `ADD` it to the content of y.
    """
    program = tl.program_id(0)
    down = tl.cdiv(m, TILE)
    across = tl.cdiv(n, ACROSS)
    group = program // (GROUP * across)
    inside = program % (GROUP * across)
    # The last group of rows may be shorter than the others.
    size = tl.minimum(down - group * GROUP, GROUP)
    rows = (group * GROUP + inside % size) * TILE + tl.arange(0, TILE)
    columns = inside // size * ACROSS + tl.arange(0, ACROSS)
    step = tl.arange(0, TILE)
    total = tl.zeros((TILE, ACROSS), tl.float32)
    for block in range(0, tl.cdiv(k, TILE)):
        at = block * TILE + step
        a = tl.load(
            a_ptr + rows[:, None].to(tl.int64) * a_row + at[None, :],
            mask=(rows[:, None] < m) & (at[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            b_ptr + columns[None, :].to(tl.int64) * b_row + at[:, None],
            mask=(columns[None, :] < n) & (at[:, None] < k),
            other=0.0,
        )
        if INTERPRETED:
            # The interpreter has no product in FP8.
            part = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(a, b)
        if A_ROWS > 0:
            part *= tl.load(
                a_scale_ptr + rows // A_ROWS * a_blocks + block, mask=rows < m, other=0.0
            )[:, None]
        if B_ROWS > 0:
            part *= tl.load(
                b_scale_ptr + columns // B_ROWS * b_blocks + block, mask=columns < n, other=0.0
            )[None, :]
        total += part
    if A_ROWS == 0:
        total *= tl.load(a_scale_ptr)
    if B_ROWS == 0:
        total *= tl.load(b_scale_ptr)
    to = y_ptr + rows[:, None].to(tl.int64) * y_row + columns[None, :]
    inside_y = (rows[:, None] < m) & (columns[None, :] < n)
    if ADD:
        total += tl.load(to, mask=inside_y, other=0.0).to(tl.float32)
    tl.store(to, cast(total, y_ptr.dtype.element_ty), mask=inside_y)


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel on `a` [m, k] and `b` [n, k] with unit strides along k; see
    `reference.scaled_product`.
    """
    y = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    _launch(y, a, a_scale, b, b_scale, add=False)
    return y


def add_scaled_product(
    into: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor
) -> None:
    """Launch the kernel so that it adds the product to `into` [m, n], which has unit strides along
    n.
    """
    _launch(into, a, a_scale, b, b_scale, add=True)


def _launch(
    y: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, add: bool
) -> None:
    m, k = a.shape
    n = b.shape[0]
    if not y.numel():
        return
    a_rows = rows_of(a, a_scale)
    b_rows = rows_of(b, b_scale)
    across = TILE // 2 if a_rows == b_rows == 1 else TILE  # scales of both take registers
    blocks = [
        scale.stride(0) if rows else 0 for rows, scale in ((a_rows, a_scale), (b_rows, b_scale))
    ]
    with on_device_of(a):
        scaled_product_kernel[(ceil_div(m, TILE) * ceil_div(n, across),)](
            a, a_scale, b, b_scale, y, m, n, k, a.stride(0), b.stride(0), y.stride(0), *blocks,
            A_ROWS=a_rows, B_ROWS=b_rows, TILE=TILE, ACROSS=across, GROUP=GROUP, ADD=add,
            num_warps=8, num_stages=3,
        )  # fmt: skip
