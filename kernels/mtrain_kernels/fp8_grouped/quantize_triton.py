"""Quantisation of experts' rows and weights on a GPU: each read once and written both ways.

A program has 128 x 128 elements of one group, whose rows begin a block of the transposed result: no
program of a group knows of another, and the host knows no group's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.fp8_grouped.reference import BLOCK, blocks_of
from mtrain_kernels.grouped_gemm.places import Places
from mtrain_kernels.grouped_gemm.triton import _bounds, _place
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.quantize.formats import FORMATS
from mtrain_kernels.quantize.tile_triton import dealt, in_order
from mtrain_kernels.quantize.triton import encode, greatest_finite, groups, load_tile, scales
from mtrain_kernels.runtime import ceil_div, on_device_of, power_of_two, rounded, sigmoid


@triton.jit
def _rows_of_block(ends_ptr, rows, SIDE: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):
    """Return a block's group, its first row and the end of its group; an unused block ends before
    it begins.
    """
    base, ends, upto, _ = _bounds(ends_ptr, rows, SIDE, GROUPS, G)
    block = tl.program_id(0)
    # As many groups end before this block as its group's number says: no search, no branch.
    group = tl.sum((upto <= block).to(tl.int32), 0)
    here = tl.arange(0, G) == group
    return (
        group,
        tl.sum(tl.where(here, base, 0), 0) + block * SIDE,
        tl.sum(tl.where(here, ends, 0), 0),
    )


@triton.jit
def _rows_tile(
    x_ptr, share_ptr, row, column, end, columns, stride, SWIGLU: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Load a tile in fp32, of the activation times the rows' shares if there are any, rounded as
    `activation` does.
    """
    if not SHARED:
        x = load_tile(x_ptr, row, column, end, columns, stride, SWIGLU)
    else:
        inside = (row[:, None] < end) & (column[None, :] < columns)
        at = x_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(share_ptr + row, mask=row < end, other=0.0).to(tl.float32)
        x = rounded(gate * sigmoid(gate) * up * share[:, None], x_ptr.dtype.element_ty)
    return x


@kernel
def rows_amax_kernel(
    x_ptr, share_ptr, ends_ptr, amax_ptr, rows, columns, stride, GROUPS: tl.constexpr,
    G: tl.constexpr,
    SWIGLU: tl.constexpr, SHARED: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Reduce the greatest finite absolute value of each group's rows; the order of tiles changes no
    bit of it.
    """
    group, first, end = _rows_of_block(ends_ptr, rows, SIDE, GROUPS, G)
    row = first + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x = _rows_tile(x_ptr, share_ptr, row, column, end, columns, stride, SWIGLU, SHARED)
    tl.atomic_max(amax_ptr + group, tl.max(greatest_finite(x, 1), 0), mask=group < GROUPS)


@kernel
def quantize_rows_kernel(
    x_ptr, share_ptr, ends_ptr, amax_ptr, q_ptr, scale_ptr, turned_ptr, turned_scale_ptr, rows,
    columns, stride,
    blocks, GROUPS: tl.constexpr, G: tl.constexpr, ONE: tl.constexpr, STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    SWIGLU: tl.constexpr, SHARED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    GREATEST: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of one group's rows: as they lie, and transposed into a block of their own,
    zeros after them.
    """
    # Of the greatest numbers: 448 is 1.75 * 2^8, 57344 is 1.75 * 2^15.
    EMAX: tl.constexpr = 8 if MANTISSA == 3 else 15
    if TURNED:
        RUN: tl.constexpr = 4 if ONE else 8
    else:
        RUN: tl.constexpr = 1  # type: ignore[no-redef]
    # bytes written at once: 16 would be 16 columns to reduce
    WIDE: tl.constexpr = 8 if TURNED else 16
    group, first, end = _rows_of_block(ends_ptr, rows, SIDE, GROUPS, G)
    row = first + dealt(SIDE, RUN)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < end) & (column[None, :] < columns)
    q_at = q_ptr + row[:, None].to(tl.int64) * columns + tl.max_contiguous(column, WIDE)[None, :]
    place = tl.program_id(0) * SIDE + tl.max_contiguous(tl.arange(0, SIDE), WIDE)
    turned_at = turned_ptr + column[:, None].to(tl.int64) * (blocks * SIDE) + place[None, :]
    x = _rows_tile(x_ptr, share_ptr, row, column, end, columns, stride, SWIGLU, SHARED)
    if ONE:
        m, _ = scales(
            tl.load(amax_ptr + group, mask=group < GROUPS, other=0.0),
            GREATEST,
            EMAX,
            "power_of_two",
        )
        q = encode(x * m, MANTISSA, BIAS, GREATEST)
        # One program is enough for the scales of all groups.
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            every = tl.arange(0, G)
            greatest = tl.load(amax_ptr + every, mask=every < GROUPS, other=0.0)
            _inverse, scale = scales(greatest, GREATEST, EMAX, "power_of_two")
            tl.store(scale_ptr + every, scale, mask=every < GROUPS)
        if STRAIGHT:
            tl.store(q_at, q, mask=inside)
        if TURNED:
            # No mask along rows: zeros fill the group's last block, as the product of weights
            # expects.
            tl.store(turned_at, tl.trans(in_order(q, SIDE, RUN)), mask=column[:, None] < columns)
    else:
        if STRAIGHT:
            q, scale = groups(x, False, SIDE, SIDE, MANTISSA, BIAS, GREATEST, "power_of_two")
            tl.store(q_at, q, mask=inside)
            at = scale_ptr + row[:, None] * tl.cdiv(columns, SIDE) + tl.program_id(1)
            tl.store(at, scale, mask=(row < end)[:, None])
        if TURNED:
            q, scale = groups(
                in_order(x, SIDE, RUN), True, SIDE, SIDE, MANTISSA, BIAS, GREATEST, "power_of_two"
            )
            tl.store(turned_at, tl.trans(q), mask=column[:, None] < columns)
            at = turned_scale_ptr + column[None, :] * blocks + tl.program_id(0)
            tl.store(at, scale, mask=(column < columns)[None, :])


@kernel
def weights_amax_kernel(
    w_ptr, offsets_ptr, amax_ptr, n, k, step, TABLE: tl.constexpr, ALIGNED: tl.constexpr,
    SIDE: tl.constexpr
):  # fmt: skip
    """Reduce the greatest finite absolute value of each group's weight."""
    down = tl.cdiv(n, SIDE)
    group = tl.program_id(0) // down
    row = tl.program_id(0) % down * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x = load_tile(
        w_ptr + _place(offsets_ptr, step, group, TABLE, ALIGNED), row, column, n, k, k, False
    )
    tl.atomic_max(amax_ptr + group, tl.max(greatest_finite(x, 1), 0))


@kernel
def quantize_weights_kernel(
    w_ptr, offsets_ptr, amax_ptr, q_ptr, scale_ptr, turned_ptr, turned_scale_ptr, n, k, step,
    ONE: tl.constexpr,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    GREATEST: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of one group's weight, both ways: with its own scale, or that of the whole
    weight.
    """
    EMAX: tl.constexpr = 8 if MANTISSA == 3 else 15
    down = tl.cdiv(n, SIDE)
    across = tl.cdiv(k, SIDE)
    group = tl.program_id(0) // down
    high = tl.program_id(0) % down
    wide = tl.program_id(1)
    row = high * SIDE + tl.arange(0, SIDE)
    column = wide * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < n) & (column[None, :] < k)
    x = load_tile(
        w_ptr + _place(offsets_ptr, step, group, TABLE, ALIGNED), row, column, n, k, k, False
    )
    amax = tl.load(amax_ptr + group) if ONE else tl.max(greatest_finite(x, 1), 0)
    m, scale = scales(amax, GREATEST, EMAX, "power_of_two")
    q = encode(x * m, MANTISSA, BIAS, GREATEST)
    whole = tl.cast(group, tl.int64) * n * k
    tl.store(q_ptr + whole + row[:, None].to(tl.int64) * k + column[None, :], q, mask=inside)
    at = turned_ptr + whole + column[:, None].to(tl.int64) * n + row[None, :]
    tl.store(at, tl.trans(q), mask=tl.trans(inside))
    if ONE:
        tl.store(scale_ptr + group, scale)
    else:
        tl.store(scale_ptr + (group * down + high) * across + wide, scale)
        tl.store(turned_scale_ptr + (group * across + wide) * down + high, scale)


def quantize_rows(
    x: Tensor, share: Tensor | None, ends: Tensor, amax: Tensor | None, format: str, one: bool,
    straight: bool,
    turned: bool, swiglu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the reference's results as bytes, those that are wanted: `straight`, and `turned`."""
    rows = x.shape[0]
    width = x.shape[1] // (1 + swiglu)
    count = ends.shape[0]
    blocks = blocks_of(rows, count)
    mantissa = FORMATS[format]
    q = x.new_empty((rows, width) if straight else (0, 0), dtype=torch.uint8)
    t = x.new_empty((width, blocks * BLOCK) if turned else (0, 0), dtype=torch.uint8)
    wide = ceil_div(width, BLOCK)
    if one:
        shape: tuple[int, ...] = (count,)
        t_shape: tuple[int, ...] = (0,)  # both forms have the tensor's one scale
    else:
        shape = (rows, wide) if straight else (0, 0)
        t_shape = (width, blocks) if turned else (0, 0)
    scale = x.new_empty(shape, dtype=torch.float32)
    t_scale = x.new_empty(t_shape, dtype=torch.float32)
    if amax is None:
        found = x.new_zeros(count if one else 0, dtype=torch.float32)
    else:
        found = amax
    constants = {"GROUPS": count, "G": power_of_two(count), "SIDE": BLOCK, "SWIGLU": swiglu}
    constants |= {"SHARED": share is not None}
    grid = (blocks, max(1, wide))
    with on_device_of(x):
        if one and amax is None and x.numel():
            rows_amax_kernel[grid](
                x, share, ends, found, rows, width, x.stride(0), **constants, num_warps=8
            )
        quantize_rows_kernel[grid](
            x, share, ends, found, q, scale, t, t_scale, rows, width, x.stride(0), blocks,
            **constants, ONE=one, STRAIGHT=straight, TURNED=turned, MANTISSA=mantissa.mantissa,
            BIAS=mantissa.bias,
            GREATEST=mantissa.greatest, num_warps=16 if one else 8,
        )  # fmt: skip
    return q, scale, t, t_scale, found if amax is None else x.new_empty(0, dtype=torch.float32)


def quantize_weights(
    weights: Sequence[Tensor], format: str, one: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reference's results as bytes, of weights that are read where they lie."""
    places = Places.of(weights)
    like = weights[0]
    n, k = places.shape
    count = places.groups
    chosen = FORMATS[format]
    down = ceil_div(n, BLOCK)
    across = ceil_div(k, BLOCK)
    q, t = (like.new_empty((count, *shape), dtype=torch.uint8) for shape in ((n, k), (k, n)))
    shapes = ((count,), (0,)) if one else ((count, down, across), (count, across, down))
    scale, t_scale = (like.new_empty(shape, dtype=torch.float32) for shape in shapes)
    amax = like.new_zeros(count if one else 0, dtype=torch.float32)
    constants = {"TABLE": places.table is not None, "ALIGNED": places.aligned, "SIDE": BLOCK}
    grid = (count * down, across)
    if q.numel():
        with on_device_of(like):
            if one:
                weights_amax_kernel[grid](
                    places.base, places.table, amax, n, k, places.step, **constants, num_warps=8
                )
            quantize_weights_kernel[grid](
                places.base, places.table, amax, q, scale, t, t_scale, n, k, places.step,
                **constants, ONE=one, MANTISSA=chosen.mantissa, BIAS=chosen.bias,
                GREATEST=chosen.greatest,
                num_warps=16 if one else 8,
            )  # fmt: skip
    return q, scale, t, t_scale
