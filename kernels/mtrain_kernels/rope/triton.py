"""Rotary position embedding on a GPU: a tile is some tokens with many heads, so that tables are read once a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two, processors

ELEMENTS = 4096  # of one tile
BACKWARD_ELEMENTS = 2048  # with more, four warps run out of registers


@triton.jit
def _load(x_ptr, at, live, half, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr):
    """First and second element of each pair in fp32, from heads that start at `at`."""
    if PAIRED:
        column = tl.arange(0, 2 * HALF)[None, None, :]
        both = tl.load(x_ptr + at + column, mask=live & (column < 2 * half), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (TOKENS, HEADS, HALF, 2)))
    else:
        column = tl.arange(0, HALF)[None, None, :]
        inside = live & (column < half)
        first = tl.load(x_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + at + half + column, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store(
    y_ptr, at, live, half, first, second,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if PAIRED:
        column = tl.arange(0, 2 * HALF)[None, None, :]
        both = tl.reshape(tl.join(first, second), (TOKENS, HEADS, 2 * HALF))
        tl.store(y_ptr + at + column, cast(both, dtype), mask=live & (column < 2 * half))
    else:
        column = tl.arange(0, HALF)[None, None, :]
        inside = live & (column < half)
        tl.store(y_ptr + at + column, cast(first, dtype), mask=inside)
        tl.store(y_ptr + at + half + column, cast(second, dtype), mask=inside)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, positions_ptr, batch, token, live, half, table, batch_stride, token_stride,
    HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Cosines and sines [TOKENS, 1, HALF]; a position outside of the table gives no number."""
    if POSITIONS:
        position = tl.load(positions_ptr + batch * batch_stride + token * token_stride, mask=live, other=0)
    else:
        position = token
    column = tl.arange(0, HALF)[None, None, :]
    known = (position >= 0) & (position < table) & (column < half)
    outside = tl.where(column < half, float("nan"), 0.0)
    at = position.to(tl.int64) * half + column
    cos = tl.load(cos_ptr + at, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, cos, outside), tl.where(known, sin, outside)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr,
    tokens, length, heads, width, half, table, eps,
    x_batch, x_token, x_head, y_batch, y_token, y_head, positions_batch, positions_token,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr, POSITIONS: tl.constexpr, NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One tile of tokens and heads; `BACKWARD` turns the other way, which is the gradient where nothing is normed."""
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64))[None, :, None]
    live = (row < tokens) & (head < heads)
    batch, token = row // length, row % length
    start = batch * x_batch + token * x_token + head * x_head
    to = batch * y_batch + token * y_token + head * y_head
    column = tl.arange(0, REST)[None, None, :] + 2 * half
    beyond = live & (column < width)
    a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
    rest = tl.load(x_ptr + start + column, mask=beyond, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a + b * b, axis=2) + tl.sum(rest * rest, axis=2)
        rstd = (1.0 / tl.sqrt(squares / width + eps))[:, :, None]
        wa, wb = _load(weight_ptr, tl.zeros((1, 1, 1), tl.int64), True, half, 1, 1, HALF, PAIRED)
        w = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            wa, wb, w = wa + 1.0, wb + 1.0, w + 1.0
        a, b, rest = a * rstd * wa, b * rstd * wb, rest * rstd * w
    cos, sin = _angles(
        cos_ptr, sin_ptr, positions_ptr, batch, token, row < tokens, half, table,
        positions_batch, positions_token, HALF, POSITIONS,
    )  # fmt: skip
    if BACKWARD:
        sin = -sin
    _store(y_ptr, to, live, half, a * cos - b * sin, b * cos + a * sin, TOKENS, HEADS, HALF, PAIRED)
    tl.store(y_ptr + to + column, cast(rest, y_ptr.dtype.element_ty), mask=beyond)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, dx_ptr, dweight_ptr,
    tokens, length, heads, width, half, table, eps,
    dy_batch, dy_token, dy_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head,
    positions_batch, positions_token,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr, POSITIONS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Gradients of normed and turned heads; each program walks over tiles and leaves fp32 sums for the weight."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64))[None, :, None]
    column = tl.arange(0, REST)[None, None, :] + 2 * half
    origin = tl.zeros((1, 1, 1), tl.int64)
    wa, wb = _load(weight_ptr, origin, True, half, 1, 1, HALF, PAIRED)
    w = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        wa, wb, w = wa + 1.0, wb + 1.0, w + 1.0
    sum_a, sum_b = tl.zeros((1, 1, HALF), tl.float32), tl.zeros((1, 1, HALF), tl.float32)
    sum_rest = tl.zeros((1, 1, REST), tl.float32)
    for first in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        row = (first + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
        live = (row < tokens) & (head < heads)
        beyond = live & (column < width)
        batch, token = row // length, row % length
        start = batch * x_batch + token * x_token + head * x_head
        above = batch * dy_batch + token * dy_token + head * dy_head
        to = batch * dx_batch + token * dx_token + head * dx_head
        a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
        rest = tl.load(x_ptr + start + column, mask=beyond, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, axis=2) + tl.sum(rest * rest, axis=2)
        rstd = (1.0 / tl.sqrt(squares / width + eps))[:, :, None]
        a, b, rest = a * rstd, b * rstd, rest * rstd
        cos, sin = _angles(
            cos_ptr, sin_ptr, positions_ptr, batch, token, row < tokens, half, table,
            positions_batch, positions_token, HALF, POSITIONS,
        )  # fmt: skip
        ya, yb = _load(dy_ptr, above, live, half, TOKENS, HEADS, HALF, PAIRED)
        drest = tl.load(dy_ptr + above + column, mask=beyond, other=0.0).to(tl.float32)
        da, db = ya * cos + yb * sin, yb * cos - ya * sin
        sum_a += tl.sum(tl.sum(da * a, axis=1, keep_dims=True), axis=0, keep_dims=True)
        sum_b += tl.sum(tl.sum(db * b, axis=1, keep_dims=True), axis=0, keep_dims=True)
        sum_rest += tl.sum(tl.sum(drest * rest, axis=1, keep_dims=True), axis=0, keep_dims=True)
        da, db, drest = da * wa, db * wb, drest * w
        along = ((tl.sum(da * a + db * b, axis=2) + tl.sum(drest * rest, axis=2)) / width)[:, :, None]
        da, db, drest = rstd * (da - a * along), rstd * (db - b * along), rstd * (drest - rest * along)
        _store(dx_ptr, to, live, half, da, db, TOKENS, HEADS, HALF, PAIRED)
        tl.store(dx_ptr + to + column, cast(drest, dx_ptr.dtype.element_ty), mask=beyond)
    at = origin + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * width
    _store(dweight_ptr, at, True, half, sum_a, sum_b, 1, 1, HALF, PAIRED)
    tl.store(dweight_ptr + at + column, sum_rest, mask=column < width)


def _grid(x: Tensor, half: int, elements: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Tiles of x [b, s, n, d] along tokens and heads, and the constants of a tile."""
    batch, length, heads, width = x.shape
    block, rest = power_of_two(half), power_of_two(width - 2 * half)
    some_heads = min(power_of_two(heads), max(1, elements // (2 * block)))
    some_tokens = max(1, min(elements // (2 * block * some_heads), power_of_two(batch * length)))
    grid = (ceil_div(batch * length, some_tokens), ceil_div(heads, some_heads))
    return grid, {"TOKENS": some_tokens, "HEADS": some_heads, "HALF": block, "REST": rest}


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
    backward: bool,
) -> Tensor:
    """Launches the forward kernel on `x` [b, s, n, d] with tables [p, r/2] and positions [b, s]; keeps x's layout."""
    y = torch.empty_like(x)
    if x.numel():
        source, into = _unit(x), y if y.stride(-1) == 1 else y.new_empty(y.shape)
        half = cos.shape[1]
        grid, tile = _grid(x, half, ELEMENTS)
        with on_device_of(x):
            forward_kernel[grid](
                source, weight if weight is None else weight.contiguous(), cos.contiguous(), sin.contiguous(),
                positions, into, x.shape[0] * x.shape[1], x.shape[1], x.shape[2], x.shape[3], half, cos.shape[0], eps,
                *source.stride()[:3], *into.stride()[:3], *((0, 0) if positions is None else positions.stride()),
                **tile, PAIRED=interleaved, POSITIONS=positions is not None, NORM=weight is not None,
                ZERO_CENTERED=zero_centered, BACKWARD=backward, num_warps=4,
            )  # fmt: skip
        if into is not y:
            y.copy_(into)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Launches the backward kernel of normed and turned heads: gradients of `x` [b, s, n, d] and of `weight` [d]."""
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    source, above, into = _unit(x), _unit(dy), dx if dx.stride(-1) == 1 else dx.new_empty(dx.shape)
    half = cos.shape[1]
    (rows, columns), tile = _grid(x, half, BACKWARD_ELEMENTS)
    grid = (min(rows, ceil_div(4 * processors(x.device), columns)), columns)
    dweight = x.new_empty((grid[0] * columns, x.shape[-1]), dtype=torch.float32)
    with on_device_of(x):
        backward_kernel[grid](
            above, source, weight.contiguous(), cos.contiguous(), sin.contiguous(), positions, into, dweight,
            x.shape[0] * x.shape[1], x.shape[1], x.shape[2], x.shape[3], half, cos.shape[0], eps,
            *above.stride()[:3], *source.stride()[:3], *into.stride()[:3],
            *((0, 0) if positions is None else positions.stride()),
            **tile, PAIRED=interleaved, POSITIONS=positions is not None, ZERO_CENTERED=zero_centered, num_warps=4,
        )  # fmt: skip
    if into is not dx:
        dx.copy_(into)
    return dx, dweight.sum(0).to(weight.dtype)
