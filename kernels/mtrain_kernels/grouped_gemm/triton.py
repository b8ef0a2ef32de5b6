"""Kernels of the grouped product: a fixed number of programs walks over the tiles of all groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.activation.triton import _up, _value_and_slope
from mtrain_kernels.grouped_gemm.places import Places
from mtrain_kernels.grouped_gemm.tiles import Tile, tile_for
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, dot, on_device_of, power_of_two, processors

CLEARED = 4096  # elements of rows of nobody that a program clears at once


@triton.jit
def _bounds(ends_ptr, rows, R: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):
    """Return, for each group, where tile 0 of all would begin, its last row, and the tiles of R
    rows up to its end.

    [G] each, and how many tiles there are in all.
    """
    group = tl.arange(0, G)
    # The host never checks counts, so ends beyond the rows are cut off here.
    end = tl.minimum(tl.load(ends_ptr + group, mask=group < GROUPS, other=0), rows)
    start = tl.minimum(
        tl.load(ends_ptr + group - 1, mask=(group > 0) & (group < GROUPS), other=0), rows
    )
    tiles = (tl.maximum(end - start, 0) + R - 1) // R
    upto = tl.cumsum(tiles, 0)
    # The first row of tile t of all tiles is then base + t R, whatever its group.
    base = start - (upto - tiles) * R
    return base, end, upto, tl.sum(tiles, 0)


@triton.jit
def _place(offsets_ptr, step, group, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the element offset of the tensor of `group` from that of the first group."""
    if TABLE:
        at = tl.load(offsets_ptr + group)
    else:
        at = tl.cast(group, tl.int64) * step
    # A promise by which the compiler makes wide loads.
    return tl.multiple_of(at, 16) if ALIGNED else at


@triton.jit
def _tile(
    tile, tiles_n, base, ends, upto, offsets_ptr, step, R: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, DOWNWARD: tl.constexpr,
):  # fmt: skip
    """Return a tile's first row, end of its group, first column, all rows and columns, where its
    weight is, and which.
    """
    high = tile // tiles_n
    c = tile % tiles_n * N
    group = tl.sum((upto <= high).to(tl.int32), 0)
    here = tl.arange(0, G) == group
    first = tl.sum(tl.where(here, base, 0), 0) + high * R
    end = tl.sum(tl.where(here, ends, 0), 0)
    place = _place(offsets_ptr, step, group, TABLE, ALIGNED)
    # The descriptor of tensors that lie downward counts from the last one.
    at = GROUPS - 1 - group if DOWNWARD else group
    return first, end, c, first + tl.arange(0, R), c + tl.arange(0, N), place, at


@triton.jit
def _clear(y_ptr, ends_ptr, rows, n, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Write zeros into the rows [rows, n] behind the last group, and into no others."""
    first = tl.minimum(tl.load(ends_ptr + GROUPS - 1), rows).to(tl.int64) * n
    last = tl.cast(rows, tl.int64) * n
    for at in range(first + tl.program_id(0) * SIZE, last, tl.num_programs(0) * SIZE):
        here = at + tl.arange(0, SIZE)
        tl.store(y_ptr + here, tl.zeros([SIZE], y_ptr.dtype.element_ty), mask=here < last)


@triton.jit
def _x_tile(x, r, inner, first, i, end, k, TMA: tl.constexpr, EVEN: tl.constexpr):
    """Load the tile of rows r and columns `inner`: by a descriptor, or by pointers."""
    if TMA:  # rows of the next group come along; their sums are not stored
        tile = x.load([first, i])
    else:
        mask = (r < end)[:, None]
        if not EVEN:
            mask = mask & (inner < k)[None, :]
        tile = tl.load(x + r.to(tl.int64)[:, None] * k + inner[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def _w_tile(
    w, place, group, c, column, inner, i, n, k, stride_n, stride_k,
    N: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load the tile [K, N] of the group's weight, [n, k] or, TURNED, [k, n]."""
    if TMA:
        if TURNED:
            tile = w.load([group, i, c]).reshape(K, N)
        else:
            tile = w.load([group, c, i]).reshape(N, K).T
    else:
        mask = (column < n)[None, :]
        if not EVEN:
            mask = mask & (inner < k)[:, None]
        at = (
            w
            + place
            + column.to(tl.int64)[None, :] * stride_n
            + inner.to(tl.int64)[:, None] * stride_k
        )
        tile = tl.load(at, mask=mask, other=0.0)
    return tile


@kernel
def rows_kernel(
    x_ptr,
    w_ptr,
    offsets_ptr,
    ends_ptr,
    y_ptr,
    rows,
    n,
    k,
    step,
    stride_n,
    stride_k,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    EXACT: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
    DOWNWARD: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Compute y[r] = x[r] w[g]^T for the group g of each row: forward, and with other strides the
    gradient of x.

    Each program finds the group of its tile among the bounds of all; rows behind the last group get
    zeros.
    """
    base, ends, upto, high_tiles = _bounds(ends_ptr, rows, R, GROUPS, G)
    tiles_n = tl.cdiv(n, N)
    # A fixed number of programs, as only the device knows how many tiles the groups make.
    for tile in range(tl.program_id(0), high_tiles * tiles_n, tl.num_programs(0)):
        first, end, c, r, column, place, at = _tile(
            tile,
            tiles_n,
            base,
            ends,
            upto,
            offsets_ptr,
            step,
            R,
            N,
            G,
            GROUPS,
            TABLE,
            ALIGNED,
            DOWNWARD,
        )
        total = tl.zeros([R, N], tl.float32)
        for i in range(0, k, K):
            inner = i + tl.arange(0, K)
            x = _x_tile(x_ptr, r, inner, first, i, end, k, TMA, EVEN)
            w = _w_tile(
                w_ptr,
                place,
                at,
                c,
                column,
                inner,
                i,
                n,
                k,
                stride_n,
                stride_k,
                N,
                K,
                TMA,
                TURNED,
                EVEN,
            )
            total = dot(x, w, total, EXACT)
        to = y_ptr + r.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(
            to, cast(total, y_ptr.dtype.element_ty), mask=(r < end)[:, None] & (column < n)[None, :]
        )
    _clear(y_ptr, ends_ptr, rows, n, GROUPS, CLEARED)


@kernel
def gated_kernel(
    x_ptr,
    w_ptr,
    offsets_ptr,
    ends_ptr,
    share_ptr,
    h_ptr,
    y_ptr,
    rows,
    width,
    k,
    step,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    EXACT: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    DOWNWARD: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Compute h[r] = x[r] w[g]^T of gates and ups, each `width`, and y[r] = act(gate) up, times
    share[r].

    A tile has the same columns of both, so that the activation needs nothing but its registers.
    """
    base, ends, upto, high_tiles = _bounds(ends_ptr, rows, R, GROUPS, G)
    tiles_n = tl.cdiv(width, N)
    for tile in range(tl.program_id(0), high_tiles * tiles_n, tl.num_programs(0)):
        first, end, c, r, column, place, at = _tile(
            tile,
            tiles_n,
            base,
            ends,
            upto,
            offsets_ptr,
            step,
            R,
            N,
            G,
            GROUPS,
            TABLE,
            ALIGNED,
            DOWNWARD,
        )
        gate = tl.zeros([R, N], tl.float32)
        up = tl.zeros([R, N], tl.float32)
        for i in range(0, k, K):
            inner = i + tl.arange(0, K)
            x = _x_tile(x_ptr, r, inner, first, i, end, k, TMA, EVEN)
            w = _w_tile(
                w_ptr, place, at, c, column, inner, i, width, k, k, 1, N, K, TMA, False, EVEN
            )
            gate = dot(x, w, gate, EXACT)
            # The rows of ups follow those of gates in the same weight.
            lower = place + tl.cast(width, tl.int64) * k
            w = _w_tile(
                w_ptr,
                lower,
                at,
                width + c,
                column,
                inner,
                i,
                width,
                k,
                k,
                1,
                N,
                K,
                TMA,
                False,
                EVEN,
            )
            up = dot(x, w, up, EXACT)
        inside = (r < end)[:, None] & (column < width)[None, :]
        # Rounded before the activation, as between two kernels: the backward reads these numbers.
        gate = cast(gate, h_ptr.dtype.element_ty)
        up = cast(up, h_ptr.dtype.element_ty)
        to = h_ptr + r.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        tl.store(to, gate, mask=inside)
        tl.store(to + width, up, mask=inside)
        value, _ = _value_and_slope(gate.to(tl.float32), 0.0, 0.0, KIND)
        value *= _up(up.to(tl.float32), 0.0, False)
        if SHARED:
            value *= tl.load(share_ptr + r, mask=r < end, other=0.0).to(tl.float32)[:, None]
        to = y_ptr + r.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(to, cast(value, y_ptr.dtype.element_ty), mask=inside)
    _clear(h_ptr, ends_ptr, rows, 2 * width, GROUPS, CLEARED)
    _clear(y_ptr, ends_ptr, rows, width, GROUPS, CLEARED)


@kernel
def weights_kernel(
    d_y_ptr,
    x_ptr,
    ends_ptr,
    d_w_ptr,
    offsets_ptr,
    rows,
    n,
    k,
    step,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
):
    """Compute d_w[g] = d_y[rows of g]^T x[rows of g], or that much more with ADD; a group without
    rows gets zeros.
    """
    tiles_n = tl.cdiv(n, N)
    tiles_k = tl.cdiv(k, K)
    for tile in range(tl.program_id(0), GROUPS * tiles_n * tiles_k, tl.num_programs(0)):
        g = tile // (tiles_n * tiles_k)
        start = 0
        if g > 0:
            start = tl.minimum(tl.load(ends_ptr + g - 1), rows)
        end = tl.minimum(tl.load(ends_ptr + g), rows)
        c = tile // tiles_k % tiles_n * N
        b = tile % tiles_k * K
        row = c + tl.arange(0, N)
        column = b + tl.arange(0, K)
        total = tl.zeros([N, K], tl.float32)
        whole = start
        if TMA:  # tiles that hold only rows of this group
            whole = start + tl.maximum(end - start, 0) // R * R
            for i in range(start, whole, R):
                total = tl.dot(d_y_ptr.load([i, c]).T, x_ptr.load([i, b]), total)
        for i in range(whole, end, R):
            r = (i + tl.arange(0, R)).to(tl.int64)
            if TMA:
                inside = (r < end)[:, None]
                # A descriptor reads on into the next group, whose rows are zeroed here.
                d_y = tl.trans(tl.where(inside, d_y_ptr.load([i, c]), 0.0))
                x = tl.where(inside, x_ptr.load([i, b]), 0.0)
            else:
                at = d_y_ptr + r[None, :] * n + row[:, None]
                d_y = tl.load(at, mask=(r < end)[None, :] & (row < n)[:, None], other=0.0)
                at = x_ptr + r[:, None] * k + column[None, :]
                x = tl.load(at, mask=(r < end)[:, None] & (column < k)[None, :], other=0.0)
            total = dot(d_y, x, total, EXACT)
        to = d_w_ptr + _place(offsets_ptr, step, g, TABLE, ALIGNED)
        to += row.to(tl.int64)[:, None] * k + column[None, :]
        inside = (row < n)[:, None] & (column < k)[None, :]
        if ADD:
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, cast(total, d_w_ptr.dtype.element_ty), mask=inside)


def _constants(places: Places, groups: int, tile: Tile, k: int) -> dict[str, object]:
    return {
        "GROUPS": groups,
        "G": power_of_two(groups),
        "TABLE": places.table is not None,
        "ALIGNED": places.aligned,
        "EVEN": k % tile.k == 0,
        "DOWNWARD": places.step < 0,
        "R": tile.rows,
        "N": tile.n,
        "K": tile.k,
        "CLEARED": CLEARED,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def rows_product(
    x: Tensor, weights: Sequence[Tensor], ends: Tensor, transposed: bool = False
) -> Tensor:
    """Compute `x` [r, k] times each row's own weight [n, k]^T, or `x` [r, n] times the weight if
    `transposed`.

    `weights` is one [n, k] for each group, or all in one [g, n, k]; `ends` [g] int32 says behind
    which row each group ends.
    """
    places = Places.of(weights)
    x = x.contiguous()
    ends = ends.contiguous()
    rows, k = x.shape
    groups = ends.shape[0]
    if transposed:
        n = places.shape[1]
        strides = (1, places.shape[1])
    else:
        n = places.shape[0]
        strides = (places.shape[1], 1)
    y = x.new_empty(rows, n)
    if y.numel() == 0:
        return y
    tile = tile_for(
        "turned" if transposed else "rows", x, rows, n, k, groups, descriptors=places.even
    )
    # An upper bound without the counts: each group adds at most one partial tile.
    most = (ceil_div(rows, tile.rows) + groups) * ceil_div(n, tile.n)
    source = x
    kept = places.base
    if tile.tma:
        source = tile.descriptor(x, [tile.rows, tile.k])
        kept = places.descriptor(tile, [1, tile.k, tile.n] if transposed else [1, tile.n, tile.k])
    with on_device_of(x):
        rows_kernel[(min(most, processors(x.device)),)](
            source,
            kept,
            places.table,
            ends,
            y,
            rows,
            n,
            k,
            places.step,
            *strides,
            EXACT=x.dtype == torch.float32,
            TMA=tile.tma,
            TURNED=transposed,
            **_constants(places, groups, tile, k),
        )
    return y


def gated_product(
    x: Tensor, weights: Sequence[Tensor], ends: Tensor, share: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Return the activation `kind` [r, n / 2] of `rows_product` [r, n], times `share` [r], and that
    product.

    The upper half of a weight [n, k] makes gates, the lower half the values that they gate.
    """
    places = Places.of(weights)
    x = x.contiguous()
    ends = ends.contiguous()
    rows, k = x.shape
    groups = ends.shape[0]
    n = places.shape[0]
    h = x.new_empty(rows, n)
    y = x.new_empty(rows, n // 2)
    if y.numel() == 0:
        return y, h
    tile = tile_for("gated", x, rows, n // 2, k, groups, descriptors=places.even)
    most = (ceil_div(rows, tile.rows) + groups) * ceil_div(n // 2, tile.n)
    source = x
    kept = places.base
    if tile.tma:
        source = tile.descriptor(x, [tile.rows, tile.k])
        kept = places.descriptor(tile, [1, tile.n, tile.k])
    with on_device_of(x):
        gated_kernel[(min(most, processors(x.device)),)](
            source,
            kept,
            places.table,
            ends,
            None if share is None else share.contiguous(),
            h,
            y,
            rows,
            n // 2,
            k,
            places.step,
            EXACT=x.dtype == torch.float32,
            TMA=tile.tma,
            KIND=kind,
            SHARED=share is not None,
            **_constants(places, groups, tile, k),
        )
    return y, h


def weights_product(
    d_y: Tensor, x: Tensor, ends: Tensor, into: Sequence[Tensor] | None = None
) -> Tensor | None:
    """Return the gradient [g, n, k] of the weights, from `d_y` [r, n] and `x` [r, k]; or it is
    added to `into`.

    `into` is one dense [n, k] for each group, of any float type.
    """
    d_y = d_y.contiguous()
    x = x.contiguous()
    ends = ends.contiguous()
    rows, n = d_y.shape
    k = x.shape[1]
    groups = ends.shape[0]
    d_w = x.new_empty(groups, n, k) if into is None else None
    places = Places.of([d_w] if d_w is not None else into or ())
    if n * k == 0:
        return d_w
    # Eight elements of half precision are 16 bytes, the alignment that descriptors need.
    tma = rows > 0 and n % 8 == 0 and (d_y.is_meta or d_y.data_ptr() % 16 == 0)
    tile = tile_for("weights", x, rows, n, k, groups, descriptors=tma)
    most = groups * ceil_div(n, tile.n) * ceil_div(k, tile.k)
    left = d_y
    right = x
    if tile.tma:
        left = tile.descriptor(d_y, [tile.rows, tile.n])
        right = tile.descriptor(x, [tile.rows, tile.k])
    with on_device_of(x):
        weights_kernel[(min(most, processors(x.device)),)](
            left,
            right,
            ends,
            places.base,
            places.table,
            rows,
            n,
            k,
            places.step,
            GROUPS=groups,
            EXACT=x.dtype == torch.float32,
            TABLE=places.table is not None,
            ALIGNED=places.aligned,
            ADD=into is not None,
            TMA=tile.tma,
            N=tile.n,
            K=tile.k,
            R=tile.rows,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return d_w
