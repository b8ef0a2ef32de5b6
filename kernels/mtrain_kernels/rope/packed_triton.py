"""Packed queries, keys and values on a GPU: norm, rotation and the way apart in one launch, and all
back in another.

A program has heads of one kind. Where its heads begin in the packed rows is worked out once; no row
is divided.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.rope.triton import (
    BACKWARD_ELEMENTS,
    ELEMENTS,
    _angles,
    _load,
    _load_rest,
    _rstd,
    _store,
    _store_rest,
    _store_sums,
    _through_norm,
    _unit,
    _weights,
    head_sides,
)
from mtrain_kernels.runtime import ceil_div, on_device_of, power_of_two, processors


@triton.jit
def _heads_of(
    block, q_blocks, kv_blocks, heads, groups, width, HEADS: tl.constexpr, GROUPED: tl.constexpr
):
    """Return the heads of a block, how many of their kind there are, and where each begins in a
    packed row.

    Grouped: the queries of a group, its key, its value, and the next group; else all queries, keys,
        values.
    """
    per = heads // groups
    kind = (block >= q_blocks).to(tl.int32) + (block >= q_blocks + kv_blocks).to(tl.int32)
    head = (block - tl.where(kind == 0, 0, q_blocks + (kind - 1) * kv_blocks)) * HEADS + tl.arange(
        0, HEADS
    )
    count = tl.where(kind == 0, heads, groups)
    if GROUPED:
        of_group = tl.where(kind == 0, per, 1)
        place = (
            head // of_group * (per + 2) + head % of_group + tl.where(kind == 0, 0, per + kind - 1)
        )
    else:
        place = head + tl.where(kind == 0, 0, heads + (kind - 1) * groups)
    return (
        kind,
        head.to(tl.int64)[None, :, None],
        count,
        (place * width).to(tl.int64)[None, :, None],
    )


@kernel
def packed_forward_kernel(
    x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    length, batches, heads, groups, width, half, table, eps, x_token, x_batch, q_blocks, kv_blocks,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Write queries and keys of a tile of tokens, normed and turned, or its values as they are, to
    the places of each kind.
    """
    kind, head, count, place = _heads_of(
        tl.program_id(1), q_blocks, kv_blocks, heads, groups, width, HEADS, GROUPED
    )  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
    live = (token < length) & (head < count)
    start = token * x_token + batch * x_batch + place
    a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
    rest = _load_rest(x_ptr, start, live, half, width, REST)
    # A program has one kind, so that its threads never diverge here.
    if kind < 2:
        if NORM:
            weight_ptr = q_weight_ptr
            if kind == 1:
                weight_ptr = k_weight_ptr
            rstd = _rstd(a, b, rest, width, eps, REST)
            wa, wb, w = _weights(weight_ptr, half, width, HALF, REST, PAIRED, ZERO_CENTERED)
            a = a * rstd * wa
            b = b * rstd * wb
            if REST > 0:
                rest = rest * rstd * w
        # q_ptr stands for positions, which are not read.
        cos, sin = _angles(
            cos_ptr, sin_ptr, q_ptr, batch, token, token < length, half, table, 0, 0, HALF, False
        )  # fmt: skip
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    to_ptr = q_ptr
    if kind == 1:
        to_ptr = k_ptr
    if kind == 2:
        to_ptr = v_ptr
    to = ((token * batches + batch) * count + head) * width
    _store(to_ptr, to, live, half, a, b, TOKENS, HEADS, HALF, PAIRED)
    _store_rest(to_ptr, to, live, half, width, rest, REST)


@kernel
def packed_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dx_ptr,
    dweight_ptr,
    length, batches, heads, groups, width, half, table, eps, x_token, x_batch, q_blocks, kv_blocks,
    q_token, q_batch, q_head, k_token, k_batch, k_head, v_token, v_batch, v_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the packed rows; a program walks over tiles and leaves fp32 sums for
    its weight in its row.
    """
    block = tl.program_id(1)
    kind, head, count, place = _heads_of(
        block, q_blocks, kv_blocks, heads, groups, width, HEADS, GROUPED
    )
    batch = tl.program_id(2).to(tl.int64)
    dy_ptr = dq_ptr
    dy_token = q_token
    dy_batch = q_batch
    dy_head = q_head
    if kind == 1:
        dy_ptr = dk_ptr
        dy_token = k_token
        dy_batch = k_batch
        dy_head = k_head
    if kind == 2:
        dy_ptr = dv_ptr
        dy_token = v_token
        dy_batch = v_batch
        dy_head = v_head
    row = width * (heads + 2 * groups)
    sum_a = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    sum_b = tl.zeros((TOKENS, HEADS, HALF), tl.float32)
    sum_rest = tl.zeros((TOKENS, HEADS, max(REST, 1)), tl.float32)
    if NORM:
        weight_ptr = q_weight_ptr
        if kind == 1:
            weight_ptr = k_weight_ptr
        wa, wb, w = _weights(weight_ptr, half, width, HALF, REST, PAIRED, ZERO_CENTERED)
    for first in range(tl.program_id(0) * TOKENS, length, tl.num_programs(0) * TOKENS):
        token = (first + tl.arange(0, TOKENS).to(tl.int64))[:, None, None]
        live = (token < length) & (head < count)
        above = token * dy_token + batch * dy_batch + head * dy_head
        da, db = _load(dy_ptr, above, live, half, TOKENS, HEADS, HALF, PAIRED)
        drest = _load_rest(dy_ptr, above, live, half, width, REST)
        if kind < 2:
            cos, sin = _angles(
                cos_ptr, sin_ptr, dq_ptr, batch, token, token < length, half, table,
                0, 0, HALF, False,
            )  # fmt: skip
            turned = da * cos + db * sin
            db = db * cos - da * sin
            da = turned
            if NORM:
                start = token * x_token + batch * x_batch + place
                a, b = _load(x_ptr, start, live, half, TOKENS, HEADS, HALF, PAIRED)
                rest = _load_rest(x_ptr, start, live, half, width, REST)
                rstd = _rstd(a, b, rest, width, eps, REST)
                a = a * rstd
                b = b * rstd
                rest = rest * rstd
                sum_a += da * a
                sum_b += db * b
                sum_rest += drest * rest
                da, db, through = _through_norm(
                    da * wa, db * wb, drest * w, a, b, rest, rstd, width, REST
                )
                if REST > 0:
                    drest = through
        to = (token * batches + batch) * row + place
        _store(dx_ptr, to, live, half, da, db, TOKENS, HEADS, HALF, PAIRED)
        _store_rest(dx_ptr, to, live, half, width, drest, REST)
    if NORM:
        program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(
            1
        ) + block
        _store_sums(dweight_ptr, program, half, width, sum_a, sum_b, sum_rest, HALF, REST, PAIRED)


class Packing(NamedTuple):
    """The layout of packed rows, and the norm of queries and keys on the way; see
    `packed.rotate_packed`.
    """

    heads: int
    groups: int
    grouped: bool
    interleaved: bool
    eps: float
    zero_centered: bool

    def constants(self) -> dict[str, bool]:
        """Return the constants that the kernels are compiled for."""
        return {
            "PAIRED": self.interleaved,
            "ZERO_CENTERED": self.zero_centered,
            "GROUPED": self.grouped,
        }


def _tiles(
    length: int, batch: int, heads: int, groups: int, width: int, half: int, elements: int
) -> tuple[tuple[int, int, int], tuple[int, int], dict[str, int]]:
    """Return the grid along tokens, blocks of heads and batch; blocks of queries and of keys; the
    constants of a tile.
    """
    sides, each = head_sides(width, half)
    some_heads = min(power_of_two(groups), max(1, elements // each))
    some_tokens = max(1, min(elements // (each * some_heads), power_of_two(length)))
    blocks = ceil_div(heads, some_heads), ceil_div(groups, some_heads)
    tile = {"TOKENS": some_tokens, "HEADS": some_heads, **sides}
    return (ceil_div(length, some_tokens), blocks[0] + 2 * blocks[1], batch), blocks, tile


def forward(
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    how: Packing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel on `x` [s, b, (n + 2 g) d]: queries [s, b, n, d], keys and values
    [s, b, g, d].
    """
    length, batch = x.shape[:2]
    heads, groups = how[:2]
    width = x.shape[2] // (heads + 2 * groups)
    half = cos.shape[1]
    q = x.new_empty((length, batch, heads, width))
    k, v = (x.new_empty((length, batch, groups, width)) for _ in range(2))
    if x.numel():
        source = _unit(x)
        grid, blocks, tile = _tiles(length, batch, heads, groups, width, half, ELEMENTS)
        weights = (None, None) if q_weight is None or k_weight is None else (q_weight, k_weight)
        with on_device_of(x):
            packed_forward_kernel[grid](
                source, *(w if w is None else w.contiguous() for w in weights), cos.contiguous(),
                sin.contiguous(),
                q, k, v, length, batch, heads, groups, width, half, cos.shape[0], how.eps,
                *source.stride()[:2],
                *blocks, **tile, **how.constants(), NORM=weights[0] is not None, num_warps=4,
            )  # fmt: skip
    return q, k, v


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    how: Packing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward kernel: gradients of `x` [s, b, (n + 2 g) d], and of both weights [d]
    or empty ones.
    """
    length, batch = dq.shape[:2]
    heads, groups = how[:2]
    width = dq.shape[3]
    half = cos.shape[1]
    dx = dq.new_empty((length, batch, (heads + 2 * groups) * width))
    norm = q_weight is not None and k_weight is not None
    if not dx.numel():
        empty = [
            torch.zeros_like(w) if w is not None else dx.new_empty(0) for w in (q_weight, k_weight)
        ]
        return dx, empty[0], empty[1]
    source = _unit(x)
    given = [_unit(t) for t in (dq, dk, dv)]
    grid, blocks, tile = _tiles(length, batch, heads, groups, width, half, BACKWARD_ELEMENTS)
    if norm:  # fewer programs leave fewer sums
        grid = (min(grid[0], ceil_div(4 * processors(dq.device), grid[1] * batch)), *grid[1:])
    sums = dq.new_empty((batch, grid[0], grid[1], width if norm else 0), dtype=torch.float32)
    weights = (q_weight.contiguous(), k_weight.contiguous()) if norm else (None, None)  # type: ignore[union-attr]
    with on_device_of(dq):
        packed_backward_kernel[grid](
            *given, source, *weights, cos.contiguous(), sin.contiguous(), dx, sums,
            length, batch, heads, groups, width, half, cos.shape[0], how.eps,
            *(source.stride()[:2] if norm else (0, 0)),
            *blocks, *(step for t in given for step in (t.stride(0), t.stride(1), t.stride(2))),
            **tile, **how.constants(), NORM=norm, num_warps=4,
        )  # fmt: skip
    if not norm:
        return dx, dx.new_empty(0), dx.new_empty(0)
    # Blocks of values come last; they have no weight, and their sums are left out.
    ends = blocks[0], blocks[0] + blocks[1]
    dq_weight = sums[:, :, : ends[0]].sum((0, 1, 2))
    dk_weight = sums[:, :, ends[0] : ends[1]].sum((0, 1, 2))
    return dx, dq_weight.to(weights[0].dtype), dk_weight.to(weights[1].dtype)  # type: ignore[union-attr]
