"""The output of a norm, recomputed tile by tile and quantised: with one scale, or transposed.

A program that holds whole rows sees too few of them for the blocks of a transposed operand.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.quantize.tile_triton import dealt, in_order
from mtrain_kernels.quantize.triton import SIDE, encode, groups, scale_dtype
from mtrain_kernels.runtime import as_rows, cast, ceil_div, on_device_of, rounded

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@kernel
def operand_kernel(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, multiplier_ptr, q_ptr, scale_ptr, rows, width,
    stride,
    BIAS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    TYPE: tl.constexpr,
    TRANSPOSE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr, GREATEST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile with the tensor's multiplier, or with a scale for each `GROUP` of a column,
    as `norm` rounds it.
    """
    RUN: tl.constexpr = 8 if TRANSPOSE and GROUP > 0 else 1
    row = tl.program_id(0) * SIDE + dealt(SIDE, RUN)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    x = tl.load(
        x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    if SUBTRACT_MEAN:
        x = tl.where(inside, x - tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None], 0.0)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    # The operations of the norm's kernel in their order: codes must agree with it to the bit.
    y = x * tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None] * weight[None, :]
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if GROUP > 0:
        y = rounded(y, TYPE)
    else:  # in pairs, Triton 3.6 would read weights and biases 2 bytes at a time
        y = cast(y, TYPE).to(tl.float32)
    if BIAS:  # without one it is 0 outside, or left out of the greatest as not a number
        y = tl.where(inside, y, 0.0)
    y = in_order(y, SIDE, RUN)
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    if GROUP == 0:
        q = encode(y * tl.load(multiplier_ptr), MANTISSA, EXPONENT, GREATEST)
    else:
        q, scale = groups(y, True, SIDE, GROUP, MANTISSA, EXPONENT, GREATEST, SCALE)
        group = tl.program_id(0) * (SIDE // GROUP) + tl.arange(0, SIDE // GROUP)
        count = tl.cdiv(rows, GROUP)
        kept = (column[None, :] < width) & (group[:, None] < count)
        tl.store(
            scale_ptr + column[None, :].to(tl.int64) * count + group[:, None], scale, mask=kept
        )
    if TRANSPOSE:
        if RUN > 1:
            row = tl.max_contiguous(row, RUN)
        at = q_ptr + column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(at, tl.trans(q), mask=tl.trans(inside))
    else:
        tl.store(q_ptr + row[:, None].to(tl.int64) * width + column[None, :], q, mask=inside)


def codes(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    zero_centered: bool,
    dtype: torch.dtype,
    format: str,
    layout: str,
    transpose: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on the normed tensor, `x` [..., h]: bytes [m, h], or transposed [h, m], and
    their scales.

    With a `multiplier` [1] scales are empty; without, codes are transposed and scales [h, ceil(m /
    group)].
    """
    width = weight.shape[0]
    source = as_rows(x, width)
    rows = source.shape[0]
    group, scale_kind = (0, "") if multiplier is not None else LAYOUTS[layout][1:]
    mantissa, exponent, greatest, _ = FORMATS[format]
    q = x.new_empty((width, rows) if transpose else (rows, width), dtype=torch.uint8)
    kind = scale_dtype(layout) if group else torch.float32
    scale = x.new_empty((width, ceil_div(rows, group)) if group else 0, dtype=kind)
    if x.numel():
        with on_device_of(x):
            operand_kernel[(ceil_div(rows, SIDE), ceil_div(width, SIDE))](
                source, weight.contiguous(), None if bias is None else bias.contiguous(), mean,
                rstd, multiplier,
                q, scale, rows, width, source.stride(0),
                BIAS=bias is not None, SUBTRACT_MEAN=mean.numel() > 0, ZERO_CENTERED=zero_centered,
                TYPE=TYPES[dtype], TRANSPOSE=transpose, GROUP=group, SCALE=scale_kind,
                MANTISSA=mantissa,
                EXPONENT=exponent, GREATEST=greatest, SIDE=SIDE, num_warps=8,
            )  # fmt: skip
    return q, scale
