"""Rotary position embedding on a GPU: a tile is some tokens with many heads, so that tables are
read once a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two, processors

ELEMENTS = 4096  # of one tile
BACKWARD_ELEMENTS = 2048  # with more, four warps run out of registers


@triton.jit
def _load(
    x_ptr,
    at,
    live,
    half,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Return first and second element of each pair in fp32, from heads that start at `at`."""
    if PAIRED:
        # Interleaved pairs are read side by side and split in registers, which keeps loads wide.
        column = tl.arange(0, 2 * HALF)[None, None, :]
        both = tl.load(x_ptr + at + column, mask=live & (column < 2 * half), other=0.0).to(
            tl.float32
        )
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
def _load_rest(x_ptr, at, live, half, width, REST: tl.constexpr):
    """Load the elements that do not turn, in fp32; one zero where all of a head turns."""
    if REST > 0:
        column = tl.arange(0, REST)[None, None, :] + 2 * half
        rest = tl.load(x_ptr + at + column, mask=live & (column < width), other=0.0).to(tl.float32)
    else:
        rest = tl.zeros((1, 1, 1), tl.float32)
    return rest


@triton.jit
def _store_rest(y_ptr, at, live, half, width, rest, REST: tl.constexpr):
    if REST > 0:
        column = tl.arange(0, REST)[None, None, :] + 2 * half
        tl.store(
            y_ptr + at + column, cast(rest, y_ptr.dtype.element_ty), mask=live & (column < width)
        )


@triton.jit
def _over_head(both, rest, REST: tl.constexpr):
    """Sum over each head: its pairs and the elements that do not turn."""
    total = tl.sum(both, axis=2)
    if REST > 0:
        total += tl.sum(rest, axis=2)
    return total[:, :, None]


@triton.jit
def _rstd(a, b, rest, width, eps, REST: tl.constexpr):
    """Return 1 over the root mean square of each head."""
    squares = _over_head(a * a + b * b, rest * rest, REST)
    return 1.0 / tl.sqrt(squares / width + eps)


@triton.jit
def _weights(
    weight_ptr,
    half,
    width,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PAIRED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Load the factors of normed elements: first and second of each pair, and the rest."""
    origin = tl.zeros((1, 1, 1), tl.int64)
    wa, wb = _load(weight_ptr, origin, True, half, 1, 1, HALF, PAIRED)
    w = _load_rest(weight_ptr, origin, True, half, width, REST)
    if ZERO_CENTERED:
        wa = wa + 1.0
        wb = wb + 1.0
        w = w + 1.0
    return wa, wb, w


@triton.jit
def _through_norm(da, db, drest, a, b, rest, rstd, width, REST: tl.constexpr):
    """Return gradients of the inputs normed to `a`, `b` and `rest`, from those of their
    products.
    """
    along = _over_head(da * a + db * b, drest * rest, REST) / width
    return rstd * (da - a * along), rstd * (db - b * along), rstd * (drest - rest * along)


@triton.jit
def _store_sums(
    dweight_ptr, program, half, width, sum_a, sum_b, sum_rest,
    HALF: tl.constexpr, REST: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Store the sums of a program over tokens and heads, in its row."""
    at = tl.zeros((1, 1, 1), tl.int64) + program * width
    sum_a = tl.sum(tl.sum(sum_a, axis=1, keep_dims=True), axis=0, keep_dims=True)
    sum_b = tl.sum(tl.sum(sum_b, axis=1, keep_dims=True), axis=0, keep_dims=True)
    _store(dweight_ptr, at, True, half, sum_a, sum_b, 1, 1, HALF, PAIRED)
    if REST > 0:
        sum_rest = tl.sum(tl.sum(sum_rest, axis=1, keep_dims=True), axis=0, keep_dims=True)
        _store_rest(dweight_ptr, at, True, half, width, sum_rest, REST)


@triton.jit
def _angles(
    cos_ptr, sin_ptr, positions_ptr, batch, token, live, half, table, batch_stride, token_stride,
    HALF: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return cosines and sines [TOKENS, 1, HALF]; a position outside of the table gives no
    number.
    """
    if POSITIONS:
        position = tl.load(
            positions_ptr + batch * batch_stride + token * token_stride, mask=live, other=0
        )
    else:
        position = token
    column = tl.arange(0, HALF)[None, None, :]
    known = (position >= 0) & (position < table) & (column < half)
    outside = tl.where(live & (column < half), float("nan"), 0.0)
    at = position.to(tl.int64) * half + column
    cos = tl.load(cos_ptr + at, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, cos, outside), tl.where(known, sin, outside)


@kernel
def forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr,
    length, heads, width, half, table, eps,
    x_batch, x_token, x_head, y_batch, y_token, y_head, positions_batch, positions_token,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr, POSITIONS: tl.constexpr, NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Turn one tile of tokens and heads; `BACKWARD` turns the other way, which is the gradient
    where nothing is normed.
    """
    batch = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64))[None, :, None]
    live = (token < length) & (head < heads)
    start = batch * x_batch + token * x_token + head * x_head
    to = batch * y_batch + token * y_token + head * y_head
    a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
    rest = _load_rest(x_ptr, start, live, half, width, REST)
    if NORM:
        rstd = _rstd(a, b, rest, width, eps, REST)
        wa, wb, w = _weights(weight_ptr, half, width, HALF, REST, PAIRED, ZERO_CENTERED)
        a = a * rstd * wa
        b = b * rstd * wb
        rest = rest * rstd * w
    cos, sin = _angles(
        cos_ptr, sin_ptr, positions_ptr, batch, token, token < length, half, table,
        positions_batch, positions_token, HALF, POSITIONS,
    )  # fmt: skip
    if BACKWARD:
        sin = -sin
    _store(y_ptr, to, live, half, a * cos - b * sin, b * cos + a * sin, TOKENS, HEADS, HALF, PAIRED)
    _store_rest(y_ptr, to, live, half, width, rest, REST)


@kernel
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, positions_ptr, dx_ptr, dweight_ptr,
    length, heads, width, half, table, eps,
    dy_batch, dy_token, dy_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head,
    positions_batch, positions_token,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr, POSITIONS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of normed and turned heads; each program walks over tiles and leaves fp32
    sums for the weight.

    The sums stay apart for each token and head of a tile until the end: only then do warps wait for
    each other.
    """
    batch = tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64))[None, :, None]
    wa, wb, w = _weights(weight_ptr, half, width, HALF, REST, PAIRED, ZERO_CENTERED)
    sum_a = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    sum_b = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    sum_rest = tl.zeros((TOKENS, HEADS, max(REST, 1)), tl.float32)
    for first in range(tl.program_id(0) * TOKENS, length, tl.num_programs(0) * TOKENS):
        token = (first + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
        live = (token < length) & (head < heads)
        start = batch * x_batch + token * x_token + head * x_head
        above = batch * dy_batch + token * dy_token + head * dy_head
        to = batch * dx_batch + token * dx_token + head * dx_head
        a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
        rest = _load_rest(x_ptr, start, live, half, width, REST)
        cos, sin = _angles(
            cos_ptr, sin_ptr, positions_ptr, batch, token, token < length, half, table,
            positions_batch, positions_token, HALF, POSITIONS,
        )  # fmt: skip
        ya, yb = _load(dy_ptr, above, live, half, TOKENS, HEADS, HALF, PAIRED)
        drest = _load_rest(dy_ptr, above, live, half, width, REST)
        rstd = _rstd(a, b, rest, width, eps, REST)
        a = a * rstd
        b = b * rstd
        rest = rest * rstd
        da = ya * cos + yb * sin
        db = yb * cos - ya * sin
        sum_a += da * a
        sum_b += db * b
        sum_rest += drest * rest
        da, db, drest = _through_norm(da * wa, db * wb, drest * w, a, b, rest, rstd, width, REST)
        _store(dx_ptr, to, live, half, da, db, TOKENS, HEADS, HALF, PAIRED)
        _store_rest(dx_ptr, to, live, half, width, drest, REST)
    program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(
        1
    ) + tl.program_id(1)
    _store_sums(dweight_ptr, program, half, width, sum_a, sum_b, sum_rest, HALF, REST, PAIRED)


def head_sides(width: int, half: int) -> tuple[dict[str, int], int]:
    """Return pairs that turn and the rest of a head in a tile, and how many elements a head has
    there.
    """
    rest = width - 2 * half
    sides = {"HALF": power_of_two(half), "REST": power_of_two(rest) if rest else 0}
    return sides, power_of_two(2 * sides["HALF"] + sides["REST"])


def _grid(x: Tensor, half: int, elements: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return tiles of x [b, s, n, d] along tokens and heads of each row of the batch, and the
    constants of a tile.
    """
    batch, length, heads, width = x.shape
    sides, each = head_sides(width, half)
    some_heads = min(power_of_two(heads), max(1, elements // each))
    some_tokens = max(1, min(elements // (each * some_heads), power_of_two(length)))
    grid = (ceil_div(length, some_tokens), ceil_div(heads, some_heads), batch)
    return grid, {"TOKENS": some_tokens, "HEADS": some_heads, **sides}


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
    """Launch the forward kernel on `x` [b, s, n, d] with tables [p, r/2] and positions [b, s];
    keeps x's layout.
    """
    y = torch.empty_like(x)
    if x.numel():
        source = _unit(x)
        # Kernels write rows of unit stride; any other layout is copied to afterwards.
        into = y if y.stride(-1) == 1 else y.new_empty(y.shape)
        half = cos.shape[1]
        grid, tile = _grid(x, half, ELEMENTS)
        with on_device_of(x):
            forward_kernel[grid](
                source, weight if weight is None else weight.contiguous(), cos.contiguous(),
                sin.contiguous(),
                positions, into, x.shape[1], x.shape[2], x.shape[3], half, cos.shape[0], eps,
                *source.stride()[:3], *into.stride()[:3],
                *((0, 0) if positions is None else positions.stride()),
                **tile, PAIRED=interleaved, POSITIONS=positions is not None,
                NORM=weight is not None,
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
    """Launch the backward kernel of normed and turned heads: gradients of `x` [b, s, n, d] and of
    `weight` [d].
    """
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(weight)
    source = _unit(x)
    above = _unit(dy)
    into = dx if dx.stride(-1) == 1 else dx.new_empty(dx.shape)
    half = cos.shape[1]
    (rows, columns, batch), tile = _grid(x, half, BACKWARD_ELEMENTS)
    # Few programs leave few sums to be added up afterwards.
    grid = (min(rows, ceil_div(4 * processors(x.device), columns * batch)), columns, batch)
    dweight = x.new_empty((grid[0] * columns * batch, x.shape[-1]), dtype=torch.float32)
    with on_device_of(x):
        backward_kernel[grid](
            above, source, weight.contiguous(), cos.contiguous(), sin.contiguous(), positions,
            into, dweight,
            x.shape[1], x.shape[2], x.shape[3], half, cos.shape[0], eps,
            *above.stride()[:3], *source.stride()[:3], *into.stride()[:3],
            *((0, 0) if positions is None else positions.stride()),
            **tile, PAIRED=interleaved, POSITIONS=positions is not None,
            ZERO_CENTERED=zero_centered, num_warps=4,
        )  # fmt: skip
    if into is not dx:
        dx.copy_(into)
    return dx, dweight.sum(0).to(weight.dtype)
