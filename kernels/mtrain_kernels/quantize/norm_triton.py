"""RMSNorm on a GPU whose result leaves as FP8: a row is read once, and written in one byte an element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.quantize.triton import encode, finite, scale_dtype, scales
from mtrain_kernels.runtime import cast, ceil_div, on_device_of, tile


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    rstd_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    GREATEST: tl.constexpr,
):
    """Whole rows per program, a scale for each `GROUP` of a row, or the tensor's multiplier where that is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight = tl.where(column < width, weight + 1.0, 0.0)
    y = cast(x * rstd * weight, x_ptr.dtype.element_ty).to(tl.float32)
    if GROUP == 0:
        tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(finite(y), 1), 0))
        y *= tl.load(multiplier_ptr)
    else:
        cut = tl.reshape(y, (ROWS, COLUMNS // GROUP, GROUP))
        m, scale = scales(tl.max(finite(cut), axis=2), GREATEST, 8 if MANTISSA == 3 else 15, SCALE)
        y = tl.reshape(cut * m[:, :, None], (ROWS, COLUMNS))
        group = tl.arange(0, COLUMNS // GROUP)[None, :]
        groups = tl.cdiv(width, GROUP)
        tl.store(scale_ptr + row * groups + group, scale, mask=(row < rows) & (group < groups))
    tl.store(q_ptr + row * width + column, encode(y, MANTISSA, BIAS, GREATEST), mask=inside)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, m: Tensor | None, format: str, layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel on `x` [m, n]: data, scales, 1 / std of each row and amax [1]; see the op."""
    rows, width = x.shape
    mantissa, bias, greatest, _ = FORMATS[format]
    group, scale_kind = (0, "fp32") if m is not None else LAYOUTS[layout][1:]
    tile_rows, columns, warps = tile(max(width, group))
    programs = ceil_div(rows, tile_rows)
    q = x.new_empty((rows, width), dtype=torch.uint8)
    kind = torch.float32 if m is not None else scale_dtype(layout)
    scale = x.new_empty((rows, ceil_div(width, group)) if group else (0, 0), dtype=kind)
    rstd = x.new_empty(rows, dtype=torch.float32)
    partial = x.new_zeros(max(1, programs), dtype=torch.float32)
    if x.numel():
        with on_device_of(x):
            rms_norm_kernel[(programs,)](
                x,
                weight,
                m,
                q,
                scale,
                rstd,
                partial,
                rows,
                width,
                x.stride(0),
                eps,
                ROWS=tile_rows,
                COLUMNS=columns,
                ZERO_CENTERED=zero_centered,
                GROUP=group,
                SCALE=scale_kind,
                MANTISSA=mantissa,
                BIAS=bias,
                GREATEST=greatest,
                num_warps=warps,
            )
    amax = partial.amax(0, keepdim=True) if m is not None else partial[:0]
    return q, scale if m is None else 1 / m, rstd, amax.clone()
