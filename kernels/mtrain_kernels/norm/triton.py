"""RMSNorm and LayerNorm on a GPU: each row is read once, held in registers in fp32, and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.runtime import as_rows, cast, ceil_div, on_device_of, processors, tile


@triton.jit
def forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """One tile of whole rows; the sum is rounded before it is normalised, so that backward sees the same numbers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    at = row[:, None] * width + column
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row[:, None] * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = cast(x, total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    if SUBTRACT_MEAN:
        mean = tl.sum(x, axis=1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    y = x * rstd[:, None] * weight
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, cast(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_normed(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride,
    SUBTRACT_MEAN: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Normed rows and their gradient; `AGAIN` reads them again, which the compiler must not save itself."""
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0, volatile=AGAIN).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    if SUBTRACT_MEAN:
        x -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    return tl.where(inside, x * rstd, 0.0), dy, rstd


@triton.jit
def backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    width,
    dy_stride,
    dtotal_stride,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    DTOTAL: tl.constexpr,
    BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Every program walks over tiles and leaves fp32 sums for the weight and the bias, which torch adds up."""
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    dweight = tl.zeros((1, COLUMNS), tl.float32)
    dbias = tl.zeros((1, COLUMNS), tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS).to(tl.int64))[:, None]
        inside = (row < rows) & (column < width)
        normed, dy, rstd = _load_normed(
            x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride, SUBTRACT_MEAN, False
        )  # fmt: skip
        along = tl.sum(dy * weight * normed, axis=1, keep_dims=True) / width
        if SUBTRACT_MEAN:
            middle = tl.sum(dy * weight, axis=1, keep_dims=True) / width
        if WIDE:  # registers do not hold a row while it is summed up, the cache does
            normed, dy, rstd = _load_normed(
                x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride, SUBTRACT_MEAN, True
            )  # fmt: skip
            weight = tl.load(weight_ptr + column, mask=column < width, other=0.0, volatile=True).to(tl.float32)
            if ZERO_CENTERED:
                weight += 1.0
        dweight += tl.sum(dy * normed, axis=0, keep_dims=True)
        if BIAS:
            dbias += tl.sum(dy, axis=0, keep_dims=True)
        dx = dy * weight - normed * along
        if SUBTRACT_MEAN:
            dx -= middle
        dx *= rstd
        if DTOTAL:
            dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * width + column, cast(dx, dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program * width + column, dweight, mask=column < width)
    if BIAS:
        tl.store(dbias_ptr + program * width + column, dbias, mask=column < width)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    subtract_mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the forward kernel on `x` [..., h]: normed, new residual, mean and 1/std of each row [rows] in fp32.

    The new residual is an empty tensor without `residual`, the mean one without `subtract_mean`.
    """
    width = weight.shape[0]
    source = as_rows(x, width)
    rows = source.shape[0]
    addend = None if residual is None else as_rows(residual, width)
    y = x.new_empty(x.shape)
    total = x.new_empty(0) if residual is None else residual.new_empty(residual.shape)
    mean = x.new_empty(rows if subtract_mean else 0, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    if x.numel():
        tile_rows, columns, warps = tile(width)
        with on_device_of(x):
            forward_kernel[(ceil_div(rows, tile_rows),)](
                source,
                addend,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                y,
                total,
                mean,
                rstd,
                rows,
                width,
                source.stride(0),
                0 if addend is None else addend.stride(0),
                eps,
                ROWS=tile_rows,
                COLUMNS=columns,
                RESIDUAL=addend is not None,
                BIAS=bias is not None,
                SUBTRACT_MEAN=subtract_mean,
                ZERO_CENTERED=zero_centered,
                num_warps=warps,
            )
    return y, total, mean, rstd


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
    zero_centered: bool,
    subtract_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernel: gradients of what was normalised (`x` [..., h]), of the weight and of the bias.

    `dtotal` is the gradient that reached the new residual directly. The bias gradient is empty without a bias.
    """
    width = weight.shape[0]
    source, grad = as_rows(x, width), as_rows(dy, width)
    through = None if dtotal is None else as_rows(dtotal, width)
    rows = source.shape[0]
    tile_rows, columns, warps = tile(width, per_warp=512)
    programs = min(ceil_div(rows, tile_rows), 2 * processors(x.device)) if x.numel() else 0
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((programs, width), dtype=torch.float32)
    dbias = x.new_empty((programs, width if has_bias else 0), dtype=torch.float32)
    if programs:
        with on_device_of(x):
            backward_kernel[(programs,)](
                grad,
                through,
                source,
                weight.contiguous(),
                mean,
                rstd,
                dx,
                dweight,
                dbias,
                rows,
                width,
                grad.stride(0),
                0 if through is None else through.stride(0),
                source.stride(0),
                ROWS=tile_rows,
                COLUMNS=columns,
                WIDE=columns > 8192,
                DTOTAL=through is not None,
                BIAS=has_bias,
                SUBTRACT_MEAN=subtract_mean,
                ZERO_CENTERED=zero_centered,
                num_warps=warps,
            )
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)
