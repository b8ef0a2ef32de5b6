"""Kernels of the softmax: a first pass over a row finds maximum and sum, a second one writes; all
in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.runtime import cast, ceil_div, exp2, on_device_of, power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
COLUMNS = 4096  # keys in a tile
ELEMENTS = 4096  # scores in a tile


@triton.jit
def _seen(
    query, key, mask_ptr, base, stride_s, stride_t, s, t, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """Which of the scores exist, and which of them are seen by their queries, [S, T].

    All that exist are read: a load that skips unseen keys would be as narrow as a score.
    """
    inside = (query[:, None] < s) & (key[None, :] < t)
    last = tl.zeros_like(query) + t - 1
    if CAUSAL:
        last = tl.minimum(last, query + (t - s))
    seen = key[None, :] <= tl.where(query < s, last, -1)[:, None]
    if MASKED:
        at = base + query[:, None].to(tl.int64) * stride_s + key[None, :].to(tl.int64) * stride_t
        seen &= tl.load(mask_ptr + at, mask=inside, other=0) != 0
    return inside, seen


@triton.jit
def _edge(block, s, t, S: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys the last query of a block sees: what lies behind need not be read."""
    edge = t
    if CAUSAL:
        edge = tl.minimum(t, tl.maximum((block + 1) * S + (t - s), 0))
    return edge


@triton.jit
def softmax_kernel(
    x_ptr,
    mask_ptr,
    sink_ptr,
    y_ptr,
    top_ptr,
    total_ptr,
    heads,
    s,
    t,
    scale,
    stride_b,
    stride_h,
    stride_s,
    stride_t,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SINK: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
):
    """S queries of one head; the maximum starts at the sink, which so takes part in the sum."""
    blocks = tl.cdiv(s, S)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    query = block * S + tl.arange(0, S)
    base = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    row = (head.to(tl.int64) * s + query)[:, None] * t
    edge = _edge(block, s, t, S, CAUSAL)
    top = tl.full([S], -float("inf"), tl.float32)
    total = tl.zeros([S], tl.float32)
    if SINK:
        top = tl.load(sink_ptr + head % heads).to(tl.float32) + tl.zeros([S], tl.float32)
        total = tl.where(top == -float("inf"), 0.0, 1.0)
    for start in range(0, edge, T):
        key = start + tl.arange(0, T)
        inside, seen = _seen(query, key, mask_ptr, base, stride_s, stride_t, s, t, CAUSAL, MASKED)
        z = tl.load(x_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        z = tl.where(seen, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * exp2((top - safe) * LOG2E) + tl.sum(exp2((z - safe[:, None]) * LOG2E), 1)
        top = higher
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.where(total == 0, 1.0, total)
    tl.store(top_ptr + head.to(tl.int64) * s + query, top, mask=query < s)
    tl.store(total_ptr + head.to(tl.int64) * s + query, total, mask=query < s)
    share = 1.0 / total
    for start in range(0, t, T):
        key = start + tl.arange(0, T)
        p = tl.zeros([S, T], tl.float32)
        if start < edge:
            inside, seen = _seen(
                query, key, mask_ptr, base, stride_s, stride_t, s, t, CAUSAL, MASKED
            )
            z = tl.load(x_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32) * scale
            p = tl.where(seen, exp2((z - top[:, None]) * LOG2E) * share[:, None], 0.0)
        inside = (query[:, None] < s) & (key[None, :] < t)
        tl.store(y_ptr + row + key[None, :], cast(p, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_kernel(
    d_y_ptr,
    x_ptr,
    mask_ptr,
    sink_ptr,
    top_ptr,
    total_ptr,
    d_x_ptr,
    d_sink_ptr,
    heads,
    s,
    t,
    scale,
    stride_b,
    stride_h,
    stride_s,
    stride_t,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SINK: tl.constexpr,
    S: tl.constexpr,
    T: tl.constexpr,
):
    """From x again and not from y, whose rounding to half precision the difference of gradients
    would magnify.
    """
    blocks = tl.cdiv(s, S)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    query = block * S + tl.arange(0, S)
    base = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    row = (head.to(tl.int64) * s + query)[:, None] * t
    edge = _edge(block, s, t, S, CAUSAL)
    top = tl.load(top_ptr + head.to(tl.int64) * s + query, mask=query < s, other=0.0)
    total = tl.load(total_ptr + head.to(tl.int64) * s + query, mask=query < s, other=1.0)
    inner = tl.zeros([S], tl.float32)
    for start in range(0, edge, T):
        key = start + tl.arange(0, T)
        inside, seen = _seen(query, key, mask_ptr, base, stride_s, stride_t, s, t, CAUSAL, MASKED)
        z = tl.load(x_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        d_y = tl.load(d_y_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32)
        inner += tl.sum(tl.where(seen, exp2((z - top[:, None]) * LOG2E) * d_y, 0.0), 1)
    share = 1.0 / total
    inner *= share
    if SINK:
        sink = tl.exp(tl.load(sink_ptr + head % heads).to(tl.float32) - top) * share
        tl.store(d_sink_ptr + head.to(tl.int64) * s + query, -sink * inner, mask=query < s)
    for start in range(0, t, T):
        key = start + tl.arange(0, T)
        d = tl.zeros([S, T], tl.float32)
        if start < edge:
            inside, seen = _seen(
                query, key, mask_ptr, base, stride_s, stride_t, s, t, CAUSAL, MASKED
            )
            z = tl.load(x_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32) * scale
            d_y = tl.load(d_y_ptr + row + key[None, :], mask=inside, other=0.0).to(tl.float32)
            p = exp2((z - top[:, None]) * LOG2E) * share[:, None]
            d = tl.where(seen, scale * p * (d_y - inner[:, None]), 0.0)
        inside = (query[:, None] < s) & (key[None, :] < t)
        tl.store(d_x_ptr + row + key[None, :], cast(d, d_x_ptr.dtype.element_ty), mask=inside)


def _tile(s: int, t: int) -> tuple[int, int]:
    columns = min(power_of_two(t), COLUMNS)
    return max(1, min(ELEMENTS // columns, power_of_two(s))), columns


def forward(
    x: Tensor, scale: float, causal: bool, mask: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of `x` [b, n, s, t]; what was subtracted and what was divided by, both fp32 [b,
    n, s].
    """
    x = x.contiguous()
    sink = None if sink is None else sink.contiguous()
    b, n, s, t = x.shape
    y = torch.empty_like(x)
    top = torch.empty(b, n, s, dtype=torch.float32, device=x.device)
    total = torch.empty_like(top)
    if y.numel() == 0:
        return y, top.zero_(), total.fill_(1.0)
    seen = None if mask is None else mask.expand(x.shape)
    rows, columns = _tile(s, t)
    with on_device_of(x):
        softmax_kernel[(b * n * ceil_div(s, rows),)](
            x,
            seen,
            sink,
            y,
            top,
            total,
            n,
            s,
            t,
            scale,
            *((0, 0, 0, 0) if seen is None else seen.stride()),
            CAUSAL=causal,
            MASKED=seen is not None,
            SINK=sink is not None,
            S=rows,
            T=columns,
            num_warps=8,
        )
    return y, top, total


def backward(
    d_y: Tensor,
    x: Tensor,
    top: Tensor,
    total: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return gradients of x and of the sink [n] (empty without one), given that of y and what
    `forward` kept.
    """
    d_y = d_y.contiguous()
    x = x.contiguous()
    sink = None if sink is None else sink.contiguous()
    b, n, s, t = x.shape
    d_x = torch.empty_like(x)
    if x.numel() == 0:
        return d_x, x.new_empty(0) if sink is None else torch.zeros_like(sink)
    d_sink = None if sink is None else torch.empty_like(top)
    seen = None if mask is None else mask.expand(x.shape)
    rows, columns = _tile(s, t)
    with on_device_of(x):
        softmax_backward_kernel[(b * n * ceil_div(s, rows),)](
            d_y,
            x,
            seen,
            sink,
            top,
            total,
            d_x,
            d_sink,
            n,
            s,
            t,
            scale,
            *((0, 0, 0, 0) if seen is None else seen.stride()),
            CAUSAL=causal,
            MASKED=seen is not None,
            SINK=sink is not None,
            S=rows,
            T=columns,
            num_warps=8,
        )
    return d_x, x.new_empty(0) if d_sink is None or sink is None else d_sink.sum((0, 2)).to(
        sink.dtype
    )
