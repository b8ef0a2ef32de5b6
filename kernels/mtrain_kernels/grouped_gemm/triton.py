"""Kernels of the grouped product: a fixed number of programs walks over the tiles of all groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.runtime import INTERPRETED, cast, ceil_div, on_device_of, power_of_two, processors


@triton.jit
def _dot(a, b, total, EXACT: tl.constexpr):
    """`total + a b` in fp32; the interpreter's product of bfloat16 is wrong, so it gets fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def rows_kernel(
    x_ptr,
    w_ptr,
    ends_ptr,
    y_ptr,
    rows,
    n,
    k,
    stride_g,
    stride_n,
    stride_k,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """y[r] = x[r] w[g]^T for the group g of each row: forward, and with other strides the gradient of x.

    One group more than there are holds the rows behind the last one; its product has no terms, so they get zeros.
    """
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(n, N)
    first = 0
    start = 0
    for g in range(GROUPS + 1):
        end = rows
        terms = 0
        if g < GROUPS:
            end = tl.minimum(tl.load(ends_ptr + g), rows)
            terms = k
        end = tl.maximum(end, start)
        tiles = tl.cdiv(end - start, R) * tiles_n
        while tile < first + tiles:
            r = start + (tile - first) // tiles_n * R + tl.arange(0, R)
            c = (tile - first) % tiles_n * N + tl.arange(0, N)
            x_at = x_ptr + r.to(tl.int64)[:, None] * k
            w_at = w_ptr + tl.cast(g, tl.int64) * stride_g + c.to(tl.int64)[None, :] * stride_n
            total = tl.zeros([R, N], tl.float32)
            for i in range(0, terms, K):
                inner = i + tl.arange(0, K)
                x = tl.load(x_at + inner[None, :], mask=(r < end)[:, None] & (inner < k)[None, :], other=0.0)
                w = tl.load(w_at + inner[:, None] * stride_k, mask=(inner < k)[:, None] & (c < n)[None, :], other=0.0)
                total = _dot(x, w, total, EXACT)
            to = y_ptr + r.to(tl.int64)[:, None] * n + c[None, :]
            tl.store(to, cast(total, y_ptr.dtype.element_ty), mask=(r < end)[:, None] & (c < n)[None, :])
            tile += tl.num_programs(0)
        first += tiles
        start = end


@triton.jit
def weights_kernel(
    d_y_ptr,
    x_ptr,
    ends_ptr,
    d_w_ptr,
    rows,
    n,
    k,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
):
    """d_w[g] = d_y[rows of g]^T x[rows of g]; a group without rows gets zeros."""
    tiles_n, tiles_k = tl.cdiv(n, N), tl.cdiv(k, K)
    for tile in range(tl.program_id(0), GROUPS * tiles_n * tiles_k, tl.num_programs(0)):
        g = tile // (tiles_n * tiles_k)
        start = 0
        if g > 0:
            start = tl.minimum(tl.load(ends_ptr + g - 1), rows)
        end = tl.minimum(tl.load(ends_ptr + g), rows)
        a = tile // tiles_k % tiles_n * N + tl.arange(0, N)
        b = tile % tiles_k * K + tl.arange(0, K)
        total = tl.zeros([N, K], tl.float32)
        for i in range(start, end, R):
            r = (i + tl.arange(0, R)).to(tl.int64)
            d_y = tl.load(
                d_y_ptr + r[None, :] * n + a[:, None], mask=(r < end)[None, :] & (a < n)[:, None], other=0.0
            )
            x = tl.load(x_ptr + r[:, None] * k + b[None, :], mask=(r < end)[:, None] & (b < k)[None, :], other=0.0)
            total = _dot(d_y, x, total, EXACT)
        to = d_w_ptr + tl.cast(g, tl.int64) * n * k + a.to(tl.int64)[:, None] * k + b[None, :]
        tl.store(to, cast(total, d_w_ptr.dtype.element_ty), mask=(a < n)[:, None] & (b < k)[None, :])


def _side(size: int, most: int) -> int:
    return min(max(power_of_two(size), 16), most)  # a tensor core takes no fewer than 16


def rows_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """`x` [r, k] times each row's own `weight[g]` [n, k]^T, or `x` [r, n] times `weight[g]` if `transposed`.

    `ends` [g] int32 says behind which row each group ends.
    """
    x, weight, ends = x.contiguous(), weight.contiguous(), ends.contiguous()
    rows, k = x.shape
    n = weight.shape[2] if transposed else weight.shape[1]
    stride_g, stride_n, stride_k = weight.stride()
    if transposed:
        stride_n, stride_k = stride_k, stride_n
    y = x.new_empty(rows, n)
    if y.numel() == 0:
        return y
    wide = x.dtype == torch.float32
    side = 64 if wide else 128
    tile_r, tile_n, tile_k = _side(rows, side), _side(n, side), _side(k, side // 2)
    most = (ceil_div(rows, tile_r) + weight.shape[0]) * ceil_div(n, tile_n)
    with on_device_of(x):
        rows_kernel[(min(most, processors(x.device)),)](
            x,
            weight,
            ends,
            y,
            rows,
            n,
            k,
            stride_g,
            stride_n,
            stride_k,
            GROUPS=weight.shape[0],
            EXACT=wide,
            R=tile_r,
            N=tile_n,
            K=tile_k,
            num_warps=8,
            num_stages=4,
        )
    return y


def weights_product(d_y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient [g, n, k] of the weights, from `d_y` [r, n] and `x` [r, k]."""
    d_y, x, ends = d_y.contiguous(), x.contiguous(), ends.contiguous()
    (rows, n), k, groups = d_y.shape, x.shape[1], ends.shape[0]
    d_w = x.new_empty(groups, n, k)
    if d_w.numel() == 0:
        return d_w
    wide = x.dtype == torch.float32
    side = 64 if wide else 128
    tile_n, tile_k, tile_r = _side(n, side), _side(k, side), _side(rows, side // 2)
    most = groups * ceil_div(n, tile_n) * ceil_div(k, tile_k)
    with on_device_of(x):
        weights_kernel[(min(most, processors(x.device)),)](
            d_y,
            x,
            ends,
            d_w,
            rows,
            n,
            k,
            GROUPS=groups,
            EXACT=wide,
            N=tile_n,
            K=tile_k,
            R=tile_r,
            num_warps=8,
            num_stages=4,
        )
    return d_w
