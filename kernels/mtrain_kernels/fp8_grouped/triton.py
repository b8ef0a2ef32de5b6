"""Products of experts' rows and weights in FP8 on a GPU, each summed over 128 elements by tensor
cores.

Those sums are scaled and added up in fp32 registers, as in `fp8_linear`. Programs walk over the
tiles of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.fp8_grouped.reference import BLOCK
from mtrain_kernels.grouped_gemm.places import Places
from mtrain_kernels.grouped_gemm.tiles import Tile
from mtrain_kernels.grouped_gemm.triton import (
    CLEARED,
    _bounds,
    _clear,
    _place,
    _tile,
    _w_tile,
    _x_tile,
)
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import (
    INTERPRETED,
    capability,
    cast,
    ceil_div,
    on_device_of,
    power_of_two,
    processors,
)


@triton.jit
def _part(a, b):
    """Return the product of two tiles, not accumulated; the interpreter has no product in FP8."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@kernel
def rows_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, ends_ptr, y_ptr, rows, n, k, GROUPS: tl.constexpr,
    G: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr, TMA: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Compute y[r] = x[r] w[g]^T for the group g of each row: forward, and with weights transposed
    the gradient of x.
    """
    base, ends, upto, high_tiles = _bounds(ends_ptr, rows, R, GROUPS, G)
    tiles_n = tl.cdiv(n, N)
    blocks = tl.cdiv(k, K)
    for tile in range(tl.program_id(0), high_tiles * tiles_n, tl.num_programs(0)):
        first, end, c, r, column, place, g = _tile(
            tile,
            tiles_n,
            base,
            ends,
            upto,
            None,
            tl.cast(n, tl.int64) * k,
            R,
            N,
            G,
            GROUPS,
            False,
            ALIGNED,
            False,
        )
        total = tl.zeros([R, N], tl.float32)
        for block in range(0, blocks):
            i = block * K
            inner = i + tl.arange(0, K)
            x = _x_tile(x_ptr, r, inner, first, i, end, k, TMA, EVEN)
            w = _w_tile(w_ptr, place, g, c, column, inner, i, n, k, k, 1, N, K, TMA, False, EVEN)
            # Not accumulated by tensor cores, whose sums in FP8 keep too few bits; see
            # `fp8_linear`.
            part = _part(x, w)
            if not ONE:
                part *= tl.load(
                    x_scale_ptr + r.to(tl.int64) * blocks + block, mask=r < end, other=0.0
                )[:, None]
                # The tile's columns lie in one block of the weight, whose scale is one number.
                part *= tl.load(w_scale_ptr + (g * tl.cdiv(n, K) + c // K) * blocks + block)
            total += part
        if ONE:
            total *= tl.load(x_scale_ptr + g)
            total *= tl.load(w_scale_ptr + g)
        to = y_ptr + r.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(
            to, cast(total, y_ptr.dtype.element_ty), mask=(r < end)[:, None] & (column < n)[None, :]
        )
    _clear(y_ptr, ends_ptr, rows, n, GROUPS, CLEARED)


@kernel
def weights_kernel(
    d_ptr, d_scale_ptr, x_ptr, x_scale_ptr, ends_ptr, d_w_ptr, offsets_ptr, rows, n, k, blocks,
    step,
    GROUPS: tl.constexpr, G: tl.constexpr, ONE: tl.constexpr, TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr, TMA: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute d_w[g] = d[:, rows of g] x[:, rows of g]^T, or that much more with ADD; a group
    without rows gives zeros.

    Blocks of rows are of one group each, with zeros where it has no rows: no tile has a mask along
    them.
    """
    _, _, upto, _ = _bounds(ends_ptr, rows, R, GROUPS, G)
    tiles_n = tl.cdiv(n, N)
    tiles_k = tl.cdiv(k, K)
    group = tl.arange(0, G)
    width = tl.cast(blocks, tl.int64) * R
    for tile in range(tl.program_id(0), GROUPS * tiles_n * tiles_k, tl.num_programs(0)):
        g = tile // (tiles_n * tiles_k)
        begin = tl.sum(tl.where(group == g - 1, upto, 0), 0)
        last = tl.sum(tl.where(group == g, upto, 0), 0)
        c = tile // tiles_k % tiles_n * N
        b = tile % tiles_k * K
        row = c + tl.arange(0, N)
        column = b + tl.arange(0, K)
        total = tl.zeros([N, K], tl.float32)
        for block in range(begin, last):
            if TMA:
                d = d_ptr.load([c, block * R])
                x = x_ptr.load([b, block * R]).T
            else:
                inner = block * R + tl.arange(0, R)
                d = tl.load(
                    d_ptr + row[:, None] * width + inner[None, :],
                    mask=(row < n)[:, None],
                    other=0.0,
                )
                x = tl.load(
                    x_ptr + column[None, :] * width + inner[:, None],
                    mask=(column < k)[None, :],
                    other=0.0,
                )
            part = _part(d, x)
            if not ONE:
                part *= tl.load(d_scale_ptr + row * blocks + block, mask=row < n, other=0.0)[
                    :, None
                ]
                part *= tl.load(x_scale_ptr + column * blocks + block, mask=column < k, other=0.0)[
                    None, :
                ]
            total += part
        if ONE:
            total *= tl.load(d_scale_ptr + g)
            total *= tl.load(x_scale_ptr + g)
        to = d_w_ptr + _place(offsets_ptr, step, g, TABLE, ALIGNED)
        to += row.to(tl.int64)[:, None] * k + column[None, :]
        inside = (row < n)[:, None] & (column < k)[None, :]
        if ADD:
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, cast(total, d_w_ptr.dtype.element_ty), mask=inside)


def tile_for(one: bool, weights: bool, x: Tensor, w: Tensor) -> Tile:
    """Return the tile of a product; scales of both operands for each block take registers.

    TMA reads what is aligned.
    """
    # TMA needs addresses and rows in multiples of 16 bytes, which are elements in FP8.
    fits = all(t.shape[-1] % 16 == 0 and (t.is_meta or t.data_ptr() % 16 == 0) for t in (x, w))
    tma = fits and capability(x.device) >= 90 and min(*x.shape, *w.shape[-2:]) >= BLOCK // 2
    wide = BLOCK // 2 if weights and not one else BLOCK
    return Tile(BLOCK, wide, BLOCK, warps=8, stages=3, tma=tma)


def rows_product(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel on `x` [r, k] and `w` [g, n, k] in FP8, both dense; see the reference."""
    rows, k = x.shape
    count, n = w.shape[:2]
    y = x.new_empty((rows, n), dtype=dtype)
    if not y.numel():
        return y
    one = w_scale.ndim == 1
    tile = tile_for(one, False, x, w)
    given: tuple[Any, Any] = (x, w)
    if tile.tma:
        shape = [*w.shape]
        given = (
            tile.descriptor(x, [tile.rows, tile.k]),
            tile.described(w, shape, [n * k, k, 1], [1, tile.n, tile.k]),
        )
    most = (ceil_div(rows, tile.rows) + count) * ceil_div(n, tile.n)
    with on_device_of(x):
        rows_kernel[(min(most, processors(x.device)),)](
            given[0], x_scale, given[1], w_scale, ends, y, rows, n, k, GROUPS=count,
            G=power_of_two(count), ONE=one,
            EVEN=k % tile.k == 0, ALIGNED=n * k % 16 == 0, TMA=tile.tma, R=tile.rows, N=tile.n,
            K=tile.k,
            CLEARED=CLEARED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def weights_product(
    d: Tensor,
    d_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    rows: int,
    into: Sequence[Tensor],
) -> None:
    """Launch the kernel on `d` [n, 128 b] and `x` [k, 128 b] in FP8; writes, or adds to, `into`.

    It is a dense [g, n, k], which is written, or a [n, k] of each group, to which the gradients
    are added.
    """
    n = d.shape[0]
    k = x.shape[0]
    count = ends.shape[0]
    one = d_scale.ndim == 1
    places = Places.of(into)
    if n * k == 0:
        return
    tile = tile_for(one, True, d, x)
    given: tuple[Any, Any] = (d, x)
    if tile.tma:
        given = tile.descriptor(d, [tile.rows, tile.k]), tile.descriptor(x, [tile.n, tile.k])
    most = count * ceil_div(n, tile.rows) * ceil_div(k, tile.n)
    with on_device_of(d):
        weights_kernel[(min(most, processors(d.device)),)](
            given[0], d_scale, given[1], x_scale, ends, places.base, places.table, rows, n, k,
            d.shape[1] // BLOCK,
            places.step, GROUPS=count, G=power_of_two(count), ONE=one,
            TABLE=places.table is not None,
            ALIGNED=places.aligned, ADD=into[0].ndim == 2, TMA=tile.tma, N=tile.rows, K=tile.n,
            R=tile.k,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
