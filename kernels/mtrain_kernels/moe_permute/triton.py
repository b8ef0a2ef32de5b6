"""Kernels of the permutation: both directions gather, so nothing is added twice and every run gives
the same bits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two

ELEMENTS = 4096  # values that one program holds


@kernel
def spread_kernel(
    tokens_ptr,
    source_ptr,
    rows_ptr,
    weights_ptr,
    results_ptr,
    d_weights_ptr,
    rows,
    hidden,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DOT: tl.constexpr,
    R: tl.constexpr,
    H: tl.constexpr,
):
    """Copy token source[r] // K to row r, times its weight; DOT also multiplies it with row r of
    `results`.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    source = tl.load(source_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    held = source >= 0
    # A valid address for rows that load nothing.
    token = tl.where(held, source // K, 0)
    weight = tl.full([R], 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_ptr + source, mask=held, other=0.0).to(tl.float32)
    dot = tl.zeros([R], tl.float32)
    for start in range(0, hidden, H):
        column = start + tl.arange(0, H)[None, :]
        inside = column < hidden
        value = tl.load(
            tokens_ptr + token[:, None] * hidden + column, mask=inside & held[:, None], other=0.0
        )
        value = value.to(tl.float32)
        at = row[:, None] * hidden + column
        if DOT:
            result = tl.load(results_ptr + at, mask=inside & held[:, None], other=0.0).to(
                tl.float32
            )
            dot += tl.sum(value * result, 1)
        if WEIGHTED:
            value = tl.where(held[:, None], value * weight[:, None], 0.0)
        tl.store(
            rows_ptr + at,
            cast(value, rows_ptr.dtype.element_ty),
            mask=inside & (row < rows)[:, None],
        )
    if DOT:
        tl.store(d_weights_ptr + source, cast(dot, d_weights_ptr.dtype.element_ty), mask=held)


@kernel
def combine_kernel(
    rows_ptr,
    position_ptr,
    weights_ptr,
    tokens_ptr,
    tokens,
    hidden,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    T: tl.constexpr,
    H: tl.constexpr,
):
    """Sum the K rows of each token in fp32, each times its weight."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    column = tl.program_id(1) * H + tl.arange(0, H)[None, :]
    live = token < tokens
    total = tl.zeros([T, H], tl.float32)
    # Always in the order of a token's copies, so that the sum has the same bits in every run.
    for j in tl.static_range(K):
        position = tl.load(position_ptr + token * K + j, mask=live, other=-1).to(tl.int64)
        kept = position >= 0
        inside = kept[:, None] & (column < hidden)
        value = tl.load(rows_ptr + position[:, None] * hidden + column, mask=inside, other=0.0).to(
            tl.float32
        )
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * K + j, mask=kept, other=0.0).to(tl.float32)
            value = value * weight[:, None]
        total += value
    to = tokens_ptr + token[:, None] * hidden + column
    tl.store(to, cast(total, tokens_ptr.dtype.element_ty), mask=live[:, None] & (column < hidden))


def spread(
    tokens: Tensor,
    source: Tensor,
    k: int,
    weights: Tensor | None = None,
    results: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return rows [r, h] of `tokens` [t, h], times `weights` [t, k] where given.

    With `results` [r, h] also the dot product of every row's token with it, at the place of its
    weight, [t, k].
    """
    tokens = tokens.contiguous()
    source = source.contiguous()
    weights = None if weights is None else weights.contiguous()
    results = None if results is None else results.contiguous()
    count = source.shape[0]
    hidden = tokens.shape[1]
    rows = tokens.new_empty(count, hidden)
    # dropped tokens have no row
    d_weights = None if results is None or weights is None else torch.zeros_like(weights)
    if rows.numel() == 0:
        return rows, d_weights
    h = min(power_of_two(hidden), ELEMENTS)
    r = max(1, min(ELEMENTS // h, 64))
    with on_device_of(tokens):
        spread_kernel[(ceil_div(count, r),)](
            tokens,
            source,
            rows,
            weights,
            results,
            d_weights,
            count,
            hidden,
            K=k,
            WEIGHTED=weights is not None,
            DOT=results is not None,
            R=r,
            H=h,
            num_warps=8,
        )
    return rows, d_weights


def combine(rows: Tensor, position: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return tokens [t, h] from `rows` [r, h] by `position` [t, k], times `weights` [t, k] where
    given.
    """
    rows = rows.contiguous()
    position = position.contiguous()
    weights = None if weights is None else weights.contiguous()
    tokens, k = position.shape
    hidden = rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    if out.numel() == 0:
        return out
    h = min(power_of_two(hidden), ELEMENTS // 2)
    t = max(1, min(ELEMENTS // 2 // h, 64))
    with on_device_of(rows):
        combine_kernel[(ceil_div(tokens, t), ceil_div(hidden, h))](
            rows,
            position,
            weights,
            out,
            tokens,
            hidden,
            K=k,
            WEIGHTED=weights is not None,
            T=t,
            H=h,
            num_warps=4,
        )
    return out
