"""RMSNorm and LayerNorm on a GPU: each row is read once, held in registers in fp32, and written
once.
"""

# Triton's tuples grow in loops that it unrolls.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.quantize.triton import encode, finite, scales
from mtrain_kernels.runtime import as_rows, cast, ceil_div, on_device_of, processors, tile

WIDE = 8192  # columns of a row that registers hold in the backward with their sums
PIECE = 4096  # columns at a time where there are more


@triton.jit
def _along(x, ROWS: tl.constexpr):
    """Sum each row; all code that follows gets the same number.

    Where y is written in one layout and its codes in another, Triton 3.6 makes the row and its sum
    in both. The two sums, in two orders, differ in the last bit now and then, and the codes are
    then not those of the written y. The sum of a single row is a scalar, which has no layout.
    """
    along = tl.sum(x, axis=1)
    if ROWS == 1:
        along = tl.zeros([1], tl.float32) + tl.sum(along, axis=0)
    return along


@kernel
def forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    multiplier_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
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
    OPERAND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr,
    GREATEST: tl.constexpr,
):
    """Norm one tile of whole rows; the sum is rounded before it is normalised, so that backward
    sees the same numbers.

    What is stored leaves quantised, too, with a scale for each `GROUP` of a row (`OPERAND`
    "blocks") or the tensor's multiplier ("tensor"), or its greatest absolute value only does
    ("amax").
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    at = row[:, None] * width + column
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(
            residual_ptr + row[:, None] * residual_stride + column, mask=inside, other=0.0
        ).to(tl.float32)
        total = cast(x, total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    if SUBTRACT_MEAN:
        mean = _along(x, ROWS) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(_along(x * x, ROWS) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    y = x * rstd[:, None] * weight
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    y = cast(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=inside)
    if OPERAND != "":
        y = tl.where(inside, y.to(tl.float32), 0.0)
        if OPERAND == "blocks":
            cut = tl.reshape(y, (ROWS, COLUMNS // GROUP, GROUP))
            m, scale = scales(
                tl.max(finite(cut), axis=2), GREATEST, 8 if MANTISSA == 3 else 15, SCALE
            )
            y = tl.reshape(cut * m[:, :, None], (ROWS, COLUMNS))
            group = tl.arange(0, COLUMNS // GROUP)[None, :]
            groups = tl.cdiv(width, GROUP)
            kept = (row[:, None] < rows) & (group < groups)
            tl.store(scale_ptr + row[:, None] * groups + group, scale, mask=kept)
        else:
            # A place for each program instead of an atomic; torch takes the greatest.
            tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(finite(y), 1), 0))
            if OPERAND == "tensor":
                y *= tl.load(multiplier_ptr)
        if OPERAND != "amax":
            tl.store(q_ptr + at, encode(y, MANTISSA, EXPONENT, GREATEST), mask=inside)


@triton.jit
def _load(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride,
    SUBTRACT_MEAN: tl.constexpr,
):  # fmt: skip
    """Return rows, their gradient, mean and 1/std as they lie."""
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    mean = rstd
    if SUBTRACT_MEAN:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    return x, dy, mean, rstd


@triton.jit
def _normed(x, mean, rstd, inside, SUBTRACT_MEAN: tl.constexpr):
    normed = x.to(tl.float32)
    if SUBTRACT_MEAN:
        normed = tl.where(inside, normed - mean, 0.0)
    return normed * rstd


@triton.jit
def _scale(weight_ptr, column, width, ZERO_CENTERED: tl.constexpr):
    """Return the factor of normed columns."""
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    return weight + 1.0 if ZERO_CENTERED else weight


@triton.jit
def _store_dx(
    dx_ptr, dtotal_ptr, row, column, inside, width, dtotal_stride, dy, normed, weight, rstd, along,
    middle,
    DTOTAL: tl.constexpr, SUBTRACT_MEAN: tl.constexpr,
):  # fmt: skip
    dx = dy * weight - normed * along
    if SUBTRACT_MEAN:
        dx -= middle
    dx *= rstd
    if DTOTAL:
        dx += tl.load(dtotal_ptr + row * dtotal_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(dx_ptr + row * width + column, cast(dx, dx_ptr.dtype.element_ty), mask=inside)


@kernel
def backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, width, dy_stride, dtotal_stride, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTOTAL: tl.constexpr, BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Walk over tiles; each program leaves fp32 sums for the weight and the bias, which torch adds
    up.

    The next tile is on its way while one is worked on.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    column = tl.arange(0, COLUMNS)[None, :]
    weight = _scale(weight_ptr, column, width, ZERO_CENTERED)
    # One sum for each row of a tile, reduced at the end and not in every step.
    dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    row = (program * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None]
    x, dy, mean, rstd = _load(
        x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride,
        SUBTRACT_MEAN
    )  # fmt: skip
    for _ in range(program * ROWS, rows, step):
        inside = (row < rows) & (column < width)
        # Behind the last rows the masks make this load nothing.
        next_x, next_dy, next_mean, next_rstd = _load(
            x_ptr, dy_ptr, mean_ptr, rstd_ptr, row + step, column, rows, width, x_stride, dy_stride,
            SUBTRACT_MEAN,
        )  # fmt: skip
        normed = _normed(x, mean, rstd, inside, SUBTRACT_MEAN)
        dy = dy.to(tl.float32)
        along = tl.sum(dy * weight * normed, axis=1, keep_dims=True) / width
        middle = along
        if SUBTRACT_MEAN:
            middle = tl.sum(dy * weight, axis=1, keep_dims=True) / width
        dweight += dy * normed
        if BIAS:
            dbias += dy
        _store_dx(
            dx_ptr, dtotal_ptr, row, column, inside, width, dtotal_stride, dy, normed, weight,
            rstd, along, middle,
            DTOTAL, SUBTRACT_MEAN,
        )  # fmt: skip
        row += step
        x = next_x
        dy = next_dy
        mean = next_mean
        rstd = next_rstd
    tl.store(
        dweight_ptr + program * width + column, tl.sum(dweight, 0)[None, :], mask=column < width
    )
    if BIAS:
        tl.store(
            dbias_ptr + program * width + column, tl.sum(dbias, 0)[None, :], mask=column < width
        )


@kernel
def wide_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr,
    rows, width, dy_stride, dtotal_stride, x_stride,
    PIECE: tl.constexpr, PIECES: tl.constexpr, DTOTAL: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Work as `backward_kernel`, a row at a time and in pieces; registers have no room for the sums
    of a bias, too.
    """
    program = tl.program_id(0)
    piece = tl.arange(0, PIECE)[None, :]
    dweight = ()
    for _ in tl.static_range(PIECES):
        dweight = dweight + (tl.zeros((1, PIECE), tl.float32),)  # noqa: RUF005 - Triton unpacks no tuple here
    for number in range(program, rows, tl.num_programs(0)):
        row = (number + tl.arange(0, 1).to(tl.int64))[:, None]
        along = tl.zeros((1, PIECE), tl.float32)
        middle = tl.zeros((1, PIECE), tl.float32)
        for i in tl.static_range(PIECES):
            column = i * PIECE + piece
            x, dy, mean, rstd = _load(
                x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride,
                SUBTRACT_MEAN,
            )  # fmt: skip
            dy = dy.to(tl.float32) * _scale(weight_ptr, column, width, ZERO_CENTERED)
            along += dy * _normed(x, mean, rstd, column < width, SUBTRACT_MEAN)
            if SUBTRACT_MEAN:
                middle += dy
        along = tl.sum(along, axis=1, keep_dims=True) / width
        if SUBTRACT_MEAN:
            middle = tl.sum(middle, axis=1, keep_dims=True) / width
        # The row is read a second time, since registers do not hold all of it.
        sums = ()
        for i in tl.static_range(PIECES):
            column = i * PIECE + piece
            x, dy, mean, rstd = _load(
                x_ptr, dy_ptr, mean_ptr, rstd_ptr, row, column, rows, width, x_stride, dy_stride,
                SUBTRACT_MEAN,
            )  # fmt: skip
            normed = _normed(x, mean, rstd, column < width, SUBTRACT_MEAN)
            dy = dy.to(tl.float32)
            sums = sums + (dweight[i] + dy * normed,)  # noqa: RUF005
            weight = _scale(weight_ptr, column, width, ZERO_CENTERED)
            _store_dx(
                dx_ptr, dtotal_ptr, row, column, column < width, width, dtotal_stride,
                dy, normed, weight, rstd, along, middle, DTOTAL, SUBTRACT_MEAN,
            )  # fmt: skip
        dweight = sums
    for i in tl.static_range(PIECES):
        column = i * PIECE + piece
        tl.store(dweight_ptr + program * width + column, dweight[i], mask=column < width)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    subtract_mean: bool,
    operand: str = "",
    format: str = "e4m3",
    layout: str = "",
    multiplier: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Launch the forward kernel on `x` [..., h]: normed, new residual, mean and 1/std of each row
    [rows] in fp32.

    The new residual is an empty tensor without `residual`, the mean one without `subtract_mean`.
    With an `operand` there are three more: bytes of what is normed in `format` [rows, h], its
    scales (of "blocks" as `layout` says) and the greatest absolute value of each tile (of "amax"
    and "tensor", which has a `multiplier`).
    """
    width = weight.shape[0]
    source = as_rows(x, width)
    rows = source.shape[0]
    addend = None if residual is None else as_rows(residual, width)
    y = x.new_empty(x.shape)
    total = x.new_empty(0) if residual is None else residual.new_empty(residual.shape)
    mean = x.new_empty(rows if subtract_mean else 0, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    _, group, scale_kind = LAYOUTS[layout] if operand == "blocks" else (1, 0, "")
    mantissa, exponent, greatest, _ = FORMATS[format]
    # At least as wide as a group, so that rows can be cut into groups.
    tile_rows, columns, warps = tile(max(width, group))
    programs = ceil_div(rows, tile_rows) if x.numel() else 0
    # Pointers that the kernel is compiled not to follow; an empty tensor costs as much as any.
    q = scale = partial = rstd
    if operand:
        q = x.new_empty((rows, width) if operand != "amax" else 0, dtype=torch.uint8)
        kind = torch.uint8 if scale_kind == "e8m0" else torch.float32
        scale = x.new_empty((rows, ceil_div(width, group)) if group else 0, dtype=kind)
        many = 0 if operand == "blocks" else max(1, programs)
        # Every program writes its own; without one the greatest is 0.
        partial = (x.new_empty if programs else x.new_zeros)(many, dtype=torch.float32)
    if programs:
        with on_device_of(x):
            forward_kernel[(programs,)](
                source, addend, weight.contiguous(), None if bias is None else bias.contiguous(),
                y, total, mean, rstd, multiplier, q, scale, partial,
                rows, width, source.stride(0), 0 if addend is None else addend.stride(0), eps,
                ROWS=tile_rows, COLUMNS=columns, RESIDUAL=addend is not None, BIAS=bias is not None,
                SUBTRACT_MEAN=subtract_mean, ZERO_CENTERED=zero_centered, OPERAND=operand,
                GROUP=group,
                SCALE=scale_kind, MANTISSA=mantissa, EXPONENT=exponent, GREATEST=greatest,
                num_warps=warps,
            )  # fmt: skip
    if not operand:
        return y, total, mean, rstd
    return y, total, mean, rstd, q, scale, partial


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
    """Launch the backward kernel: gradients of the normed tensor (`x` [..., h]), of the weight and
    of the bias.

    `dtotal` is the gradient that reached the new residual directly. The bias gradient is in fp32,
    and empty without a bias.
    """
    width = weight.shape[0]
    source = as_rows(x, width)
    grad = as_rows(dy, width)
    through = None if dtotal is None else as_rows(dtotal, width)
    rows = source.shape[0]
    tile_rows, columns, warps = tile(width, per_warp=512)
    # Few programs leave few rows of sums to be added up afterwards.
    programs = min(ceil_div(rows, tile_rows), 2 * processors(x.device)) if x.numel() else 0
    dx = x.new_empty(x.shape)
    dweight = x.new_empty((programs, width), dtype=torch.float32)
    # Without a bias this is the gradient that is returned.
    dbias = x.new_empty((programs, width) if has_bias else 0, dtype=torch.float32)
    operands = (grad, through, source, weight.contiguous(), mean, rstd, dx, dweight)
    sizes = (
        rows,
        width,
        grad.stride(0),
        0 if through is None else through.stride(0),
        source.stride(0),
    )
    settings = {
        "DTOTAL": through is not None,
        "SUBTRACT_MEAN": subtract_mean,
        "ZERO_CENTERED": zero_centered,
    }
    if programs:
        with on_device_of(x):
            if columns > WIDE:
                pieces = {"PIECE": PIECE, "PIECES": ceil_div(width, PIECE)}
                wide_backward_kernel[(programs,)](
                    *operands, *sizes, **pieces, **settings, num_warps=16
                )
                # By torch, as the wide kernel has no registers left for these sums.
                dbias = grad.sum(0, keepdim=True, dtype=torch.float32) if has_bias else dbias
            else:
                shape = {"ROWS": tile_rows, "COLUMNS": columns, "BIAS": has_bias}
                backward_kernel[(programs,)](
                    *operands, dbias, *sizes, **shape, **settings, num_warps=warps
                )
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0) if has_bias else dbias
