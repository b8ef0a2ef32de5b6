"""Gated and squared activations on a GPU: one pass over gate and up, everything in between stays in
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.activation.reference import GATED
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import as_rows, cast, ceil_div, on_device_of, power_of_two, sigmoid

ELEMENTS = 4096  # outputs of one tile
WARPS = 8


@triton.jit
def _value_and_slope(x, alpha, limit, KIND: tl.constexpr):
    """Return the activation of a gate (or of x, squared_relu) and its derivative, in fp32."""
    if KIND == "squared_relu":
        # Not a maximum, which would turn NaN into zero.
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        slope = 2 * positive
    elif KIND == "swiglu":
        share = sigmoid(x)
        value = x * share
        slope = share * (1 + x * (1 - share))
    elif KIND == "swiglu_clamped":
        below = tl.where(x > limit, limit, x)
        share = sigmoid(alpha * below)
        value = below * share
        slope = share * (1 + alpha * below * (1 - share))
    elif KIND == "geglu":
        # The distribution function of a Gaussian, and its density below: the constants are 1 /
        # sqrt(2) and 1 / sqrt(2 pi).
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        # flat beyond; its cube would overflow
        near = tl.where(x > 20.0, 20.0, tl.where(x < -20.0, -20.0, x))
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which needs no tanh; 1.5957 is 2 sqrt(2 / pi).
        share = sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))
        value = x * share
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * near * near)
    return value, slope


@triton.jit
def _up(u, limit, CLAMPED: tl.constexpr):
    """Return the factor of the activated gate."""
    if CLAMPED:
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u)) + 1
    return u


@kernel
def forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rows,
    width,
    x_stride,
    alpha,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Compute one tile of the result, which is `width` wide."""
    # int64, since row times stride leaves int32 in tensors of more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    at = x_ptr + row * x_stride + column
    y, _ = _value_and_slope(tl.load(at, mask=inside, other=0.0).to(tl.float32), alpha, limit, KIND)
    if GATE:
        y *= _up(
            tl.load(at + width, mask=inside, other=0.0).to(tl.float32),
            limit,
            KIND == "swiglu_clamped",
        )
    if WEIGHT:
        y *= tl.load(weight_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


@kernel
def backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    rows,
    width,
    dy_stride,
    x_stride,
    alpha,
    limit,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Compute gradients of a stripe of tiles; the grid has one column of programs if a weight needs
    the whole row.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dx_stride = 2 * width if GATE else width
    weight = 1.0
    if WEIGHT:
        weight = tl.load(weight_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, 1), tl.float32)
    for start in range(tl.program_id(1) * COLUMNS, width, tl.num_programs(1) * COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < width)
        at = x_ptr + row * x_stride + column
        to = dx_ptr + row * dx_stride + column
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value, slope = _value_and_slope(gate, alpha, limit, KIND)
        dgate = dy * weight * slope
        if GATE:
            raw = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
            up = _up(raw, limit, KIND == "swiglu_clamped")
            dgate *= up
            dup = dy * weight * value
            value *= up
            if KIND == "swiglu_clamped":  # nothing flows where a clamp holds
                dgate = tl.where(gate <= limit, dgate, 0.0)
                dup = tl.where((raw >= -limit) & (raw <= limit), dup, 0.0)
            tl.store(to + width, cast(dup, dx_ptr.dtype.element_ty), mask=inside)
        tl.store(to, cast(dgate, dx_ptr.dtype.element_ty), mask=inside)
        if WEIGHT:
            dweight += tl.sum(tl.where(inside, dy * value, 0.0), axis=1, keep_dims=True)
    if WEIGHT:
        tl.store(dweight_ptr + row, cast(dweight, dweight_ptr.dtype.element_ty), mask=row < rows)


def _tile(width: int) -> tuple[int, int]:
    columns = min(power_of_two(width), ELEMENTS)
    # Narrow rows share a tile and wide ones are cut, so that a program's work stays the same.
    return ELEMENTS // columns, columns


def forward(x: Tensor, weight: Tensor | None, kind: str, alpha: float, limit: float) -> Tensor:
    """Launch the forward kernel on `x` [..., f'] and `weight` [...]: the activation,
    contiguous.
    """
    gate = kind in GATED
    width = x.shape[-1] // 2 if gate else x.shape[-1]
    y = x.new_empty((*x.shape[:-1], width))
    if y.numel():
        source = as_rows(x, x.shape[-1])
        rows, columns = _tile(width)
        with on_device_of(x):
            forward_kernel[(ceil_div(source.shape[0], rows), ceil_div(width, columns))](
                source,
                None if weight is None else weight.contiguous(),
                y,
                source.shape[0],
                width,
                source.stride(0),
                alpha,
                limit,
                ROWS=rows,
                COLUMNS=columns,
                KIND=kind,
                GATE=gate,
                WEIGHT=weight is not None,
                num_warps=WARPS,
            )
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, kind: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel: gradients of `x` and of `weight`, the second empty without a
    weight.
    """
    gate = kind in GATED
    width = dy.shape[-1]
    dx = x.new_empty(x.shape)
    if weight is None:
        dweight = x.new_empty(0)
    elif dy.numel():
        dweight = weight.new_empty(weight.shape)
    else:
        # No program runs for rows without elements, and their weights still need a gradient.
        dweight = weight.new_zeros(weight.shape)
    if dy.numel():
        source = as_rows(x, x.shape[-1])
        grad = as_rows(dy, width)
        rows, columns = _tile(width)
        # The gradient of a row's weight is a sum over the row, so one program must see all of it.
        stripes = ceil_div(width, columns) if weight is None else 1
        with on_device_of(x):
            backward_kernel[(ceil_div(source.shape[0], rows), stripes)](
                grad,
                source,
                None if weight is None else weight.contiguous(),
                dx,
                dweight,
                source.shape[0],
                width,
                grad.stride(0),
                source.stride(0),
                alpha,
                limit,
                ROWS=rows,
                COLUMNS=columns,
                KIND=kind,
                GATE=gate,
                WEIGHT=weight is not None,
                num_warps=WARPS,
            )
    return dx, dweight
