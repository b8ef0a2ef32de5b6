"""The registered steps of a grouped product in FP8: operands of rows and of weights, and both kinds
of product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain_kernels.fp8_grouped import reference
from mtrain_kernels.fp8_grouped.reference import BLOCK, blocks_of
from mtrain_kernels.operators import operator
from mtrain_kernels.quantize.formats import FORMATS
from mtrain_kernels.runtime import as_rows, ceil_div


class Grouped(NamedTuple):
    """Rows or weights of groups in FP8, as they lie and transposed, each empty where it is not
    wanted.

    Of rows `data` [r, k] and `transposed` [k, 128 b] with b blocks; of weights [g, n, k] and [g, k,
    n]. With one scale for a group's these are [g] in both; `amax` [g] are the maxima that they were
    made from.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor
    amax: Tensor


def quantize_rows(
    x: Tensor,
    ends: Tensor,
    format: str,
    one: bool,
    backend: str,
    *,
    share: Tensor | None = None,
    amax: Tensor | None = None,
    straight: bool = True,
    transposed: bool = True,
    swiglu: bool = False,
) -> Grouped:
    """Quantise `x` [r, k], whose groups end at rows `ends` [g]; see `reference.quantize_rows`."""
    rows = as_rows(x.detach(), x.shape[1])
    share = None if share is None else share.detach().contiguous()
    found = _rows(rows, share, ends, amax, format, one, straight, transposed, swiglu, backend)
    return _typed(found, format, one, amax)


def quantize_weights(weights: Sequence[Tensor], format: str, one: bool, backend: str) -> Grouped:
    """Quantise `weights`: [n, k] per group, or [g, n, k]; see `reference.quantize_weights`."""
    found = _weights([w.detach() for w in weights], format, one, backend)
    return _typed((*found, found[1].new_empty(0)), format, one, None)


def _typed(found: Sequence[Tensor], format: str, one: bool, amax: Tensor | None) -> Grouped:
    data, scale, turned, turned_scale, made = found
    dtype = FORMATS[format].dtype
    again = scale if one else turned_scale
    assert dtype is not None
    amax = made if amax is None else amax
    # Operators exchange bytes, see `quantize.op._bytes`; here they get their dtype back.
    return Grouped(data.view(dtype), scale, turned.view(dtype), again, amax)


def _rows_shapes(x, ends, amax, one, straight, transposed, swiglu):
    rows = x.shape[0]
    width = x.shape[1] // (1 + swiglu)
    count = ends.shape[0]
    blocks = blocks_of(rows, count)
    code = torch.uint8
    scale = torch.float32
    if one:
        shape: tuple[int, ...] = (count,)
        t_shape: tuple[int, ...] = (0,)  # both forms have the tensor's one scale
    else:
        shape = (rows, ceil_div(width, BLOCK)) if straight else (0, 0)
        t_shape = (width, blocks) if transposed else (0, 0)
    return (
        x.new_empty((rows, width) if straight else (0, 0), dtype=code),
        x.new_empty(shape, dtype=scale),
        x.new_empty((width, blocks * BLOCK) if transposed else (0, 0), dtype=code),
        x.new_empty(t_shape, dtype=scale),
        x.new_empty(count if one and amax is None else 0, dtype=scale),
    )


@operator("fp8_grouped_rows", shapes=_rows_shapes)
def _rows(
    x: Tensor,
    share: Tensor | None,
    ends: Tensor,
    amax: Tensor | None,
    format: str,
    one: bool,
    straight: bool,
    transposed: bool,
    swiglu: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if backend == "reference":
        q, scale, turned, turned_scale, found = reference.quantize_rows(
            x, share, ends, amax, format, one, swiglu
        )
        nothing = scale.new_empty((0, 0))
        if one:
            turned_scale = scale.new_empty(0)
        else:
            turned_scale = turned_scale if transposed else nothing
        wanted = q.view(torch.uint8) if straight else nothing.to(torch.uint8)
        turned = turned.view(torch.uint8) if transposed else nothing.to(torch.uint8)
        found = found if amax is None else scale.new_empty(0)  # no two results may share memory
        return wanted, scale if one or straight else nothing.clone(), turned, turned_scale, found
    from mtrain_kernels.fp8_grouped import quantize_triton

    return quantize_triton.quantize_rows(
        x, share, ends, amax, format, one, straight, transposed, swiglu
    )


def _weights_shapes(weights, one):
    like = weights[0]
    n, k = like.shape[-2:]
    count = like.shape[0] if like.ndim == 3 else len(weights)
    down = ceil_div(n, BLOCK)
    across = ceil_div(k, BLOCK)
    return (
        like.new_empty((count, n, k), dtype=torch.uint8),
        like.new_empty((count,) if one else (count, down, across), dtype=torch.float32),
        like.new_empty((count, k, n), dtype=torch.uint8),
        like.new_empty((0,) if one else (count, across, down), dtype=torch.float32),
    )


@operator("fp8_grouped_weights", shapes=_weights_shapes)
def _weights(
    weights: Sequence[Tensor], format: str, one: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend == "reference":
        each = list(weights[0]) if weights[0].ndim == 3 else weights
        q, scale, turned, turned_scale = reference.quantize_weights(each, format, one)
        none = turned_scale.new_empty(0)
        return q.view(torch.uint8), scale, turned.view(torch.uint8), none if one else turned_scale
    from mtrain_kernels.fp8_grouped import quantize_triton

    return quantize_triton.quantize_weights(weights, format, one)


@operator(
    "fp8_grouped_product",
    shapes=lambda x, w, dtype: x.new_empty((x.shape[0], w.shape[1]), dtype=dtype),
)
def rows_product(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Return `y_r = W_g x_r` [r, n] in `dtype` of FP8 operands; zeros after the last group."""
    if backend == "reference":
        return reference.rows_product(x, x_scale, w, w_scale, ends, dtype)
    from mtrain_kernels.fp8_grouped import triton

    return triton.rows_product(x, x_scale, w, w_scale, ends, dtype)


@operator(
    "fp8_grouped_dw",
    shapes=lambda d, x, ends, dtype: d.new_empty(
        (ends.shape[0], d.shape[0], x.shape[0]), dtype=dtype
    ),
)
def weights_product(
    d: Tensor,
    d_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    rows: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """Return the gradient [g, n, k] of weights from transposed operands `d` [n, 128 b] and `x` [k,
    128 b] of `rows` rows.
    """
    if backend == "reference":
        return reference.weights_product(d, d_scale, x, x_scale, ends.clamp(max=rows)).to(dtype)
    from mtrain_kernels.fp8_grouped import triton

    made = d.new_empty((ends.shape[0], d.shape[0], x.shape[0]), dtype=dtype)
    triton.weights_product(d, d_scale, x, x_scale, ends, rows, [made])
    return made


@operator("fp8_grouped_add_dw", mutates=("into",))
def add_weights_product(
    d: Tensor,
    d_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    rows: int,
    into: Sequence[Tensor],
    backend: str,
) -> None:
    """Add the gradients to `into`, a dense [n, k] for each group; raises `ValueError` where one is
    not dense.
    """
    if any(not buffer.is_contiguous() for buffer in into):
        raise ValueError("gradients are added to dense buffers")
    if backend == "reference":
        made = reference.weights_product(d, d_scale, x, x_scale, ends.clamp(max=rows))
        for buffer, gradient in zip(into, made, strict=True):
            buffer.add_(gradient)
        return
    from mtrain_kernels.fp8_grouped import triton

    triton.weights_product(d, d_scale, x, x_scale, ends, rows, into)
