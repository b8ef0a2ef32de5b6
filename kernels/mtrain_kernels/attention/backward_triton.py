"""Backward of fused attention: one pass over keys makes the gradient of queries, one over queries
those of keys.

Every sum has one owner and one order: there are no atomics, and the same call gives the same bits.
Key heads that several query heads share are read in place, and sum the gradients of all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.attention.seen import Seen
from mtrain_kernels.attention.tiles import tile_for
from mtrain_kernels.attention.triton import (
    LOG2E,
    _interval,
    _logits,
    _phases,
    _rows,
    _store,
    constants,
    dense_rows,
    token_major,
)
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, dot, on_device_of


@triton.jit
def _queries_over_keys(
    low, high, q, q2, d_out, lse, delta, d_q, d_q2, k_ptr, v_ptr, k_stride, v_stride, first, last,
    t, d, e, scale,
    cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
    EVEN_E: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the share of key tiles in [low, high) in the gradient of queries."""
    for j in range(low, high, N):
        k = _rows(k_ptr, j, k_stride, t, d, N, 0, D, not MASKED, EVEN)
        v = _rows(v_ptr, j, v_stride, t, e, N, 0, E, not MASKED, EVEN_E)
        x = dot(q, tl.trans(k), None, EXACT)
        if D2 > 0:
            k2 = _rows(k_ptr, j, k_stride, t, d, N, D, D2, not MASKED, EVEN)
            x = dot(q2, tl.trans(k2), x, EXACT)
        z, bent = _logits(x, scale, cap, CAPPED)
        # Probabilities are recomputed from the log-sum-exp, as storing one for each pair would take
        # memory quadratic in the length.
        p = tl.exp2(z - lse[:, None])
        if MASKED:
            key = j + tl.arange(0, N)
            p = tl.where((key[None, :] >= first[:, None]) & (key[None, :] < last[:, None]), p, 0.0)
        # Gradient of a softmax: the key's own term less the one that all keys of a row share.
        d_z = p * (dot(d_out, tl.trans(v), None, EXACT) - delta[:, None])
        if CAPPED:
            d_z *= 1 - bent * bent
        # Tensor cores multiply in half precision; only their sums are in fp32.
        d_x = cast(d_z, k.dtype)
        d_q = dot(d_x, k, d_q, EXACT)
        if D2 > 0:
            d_q2 = dot(d_x, k2, d_q2, EXACT)
    return d_q, d_q2


@kernel
def queries_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, lse_ptr, d_out_ptr, d_lse_ptr, d_q_ptr, delta_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    d_batch, d_head, d_row, g_batch, g_head, g_row,
    heads, share, s, t, d, e, left, right, shift, scale, cap,
    WITH_LSE: tl.constexpr, TABLE: tl.constexpr, LEFT: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    EVEN: tl.constexpr, EVEN_E: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of queries, and the term of their logits' gradients that all keys share
    (`delta`).
    """
    # Last rows first: under a causal mask they see the most keys and take longest.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    # int64 before the products, since an index times the stride of a batch may leave int32.
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = (h // share).to(tl.int64)
    k_ptr += b64 * k_batch + g64 * k_head
    v_ptr += b64 * v_batch + g64 * v_head
    row = start + tl.arange(0, M)
    inside = row < s
    at = (b64 * heads + h64) * s + row
    d_out = _rows(
        d_out_ptr + b64 * d_batch + h64 * d_head, start, d_row, s, e, M, 0, E, False, EVEN_E
    )
    out = _rows(out_ptr + b64 * o_batch + h64 * o_head, start, o_row, s, e, M, 0, E, False, EVEN_E)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if WITH_LSE:
        # This gradient reaches every logit times p, as delta does below: the two merge.
        delta -= tl.load(d_lse_ptr + at, mask=inside, other=0.0)
    tl.store(delta_ptr + at, delta, mask=inside)
    # Logits are in units of log 2 here, because the hardware has exp2.
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0) * LOG2E
    q_ptr += b64 * q_batch + h64 * q_head
    q = _rows(q_ptr, start, q_row, s, d, M, 0, D, False, EVEN)
    # Placeholders where a head has no second part (D2 = 0): arguments must exist, though nobody
    # reads them.
    q2 = q
    d_q = tl.zeros([M, D], tl.float32)
    d_q2 = tl.zeros([M, 16], tl.float32)
    if D2 > 0:
        q2 = _rows(q_ptr, start, q_row, s, d, M, D, D2, False, EVEN)
        d_q2 = tl.zeros([M, D2], tl.float32)
    first, last = _interval(row, table_ptr, s, t, left - shift, right + shift, TABLE)
    low, begin, end, high = _phases(first, last, inside, t, N)
    if LEFT:
        d_q, d_q2 = _queries_over_keys(
            low, begin, q, q2, d_out, lse, delta, d_q, d_q2, k_ptr, v_ptr, k_row, v_row, first,
            last, t, d, e, scale,
            cap, True, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
        )  # fmt: skip
    # Most tiles of a long sequence are seen whole and skip the mask.
    d_q, d_q2 = _queries_over_keys(
        begin, end, q, q2, d_out, lse, delta, d_q, d_q2, k_ptr, v_ptr, k_row, v_row, first, last,
        t, d, e, scale,
        cap, False, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
    )  # fmt: skip
    d_q, d_q2 = _queries_over_keys(
        end, high, q, q2, d_out, lse, delta, d_q, d_q2, k_ptr, v_ptr, k_row, v_row, first, last, t,
        d, e, scale,
        cap, True, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
    )  # fmt: skip
    d_q_ptr += b64 * g_batch + h64 * g_head
    # Once for each element of the result and not for each pair.
    _store(d_q_ptr, d_q * scale, start, g_row, s, d, M, 0, D)
    if D2 > 0:
        _store(d_q_ptr, d_q2 * scale, start, g_row, s, d, M, D, D2)


@kernel
def keys_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lse_ptr, delta_ptr, d_out_ptr, d_k_ptr, d_v_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head, d_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, share, s, t, d, e, left, right, shift, scale, cap,
    TABLE: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    EVEN: tl.constexpr, EVEN_E: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, over all query heads that share them."""
    start = tl.program_id(0) * N
    groups = heads // share
    b = tl.program_id(1) // groups
    g = tl.program_id(1) % groups
    b64 = b.to(tl.int64)
    g64 = g.to(tl.int64)
    k_ptr += b64 * k_batch + g64 * k_head
    k = _rows(k_ptr, start, k_row, t, d, N, 0, D, False, EVEN)
    v = _rows(v_ptr + b64 * v_batch + g64 * v_head, start, v_row, t, e, N, 0, E, False, EVEN_E)
    k2 = k
    d_k = tl.zeros([N, D], tl.float32)
    d_v = tl.zeros([N, E], tl.float32)
    d_k2 = tl.zeros([N, 16], tl.float32)
    if D2 > 0:
        k2 = _rows(k_ptr, start, k_row, t, d, N, D, D2, False, EVEN)
        d_k2 = tl.zeros([N, D2], tl.float32)
    row = start + tl.arange(0, N)
    half = table_ptr
    if TABLE:
        # The half of the table that keys index lies behind the 2 s numbers of the queries.
        half += 2 * s
    # The window as a key sees it: left and right trade places, and the shift changes its sign.
    first, last = _interval(row, half, t, s, right + shift, left - shift, TABLE)
    low, begin, end, high = _phases(first, last, row < t, s, M)
    tiles = tl.cdiv(tl.maximum(high - low, 0), M)
    q_ptr += b64 * q_batch + g64 * share * q_head
    d_out_ptr += b64 * d_batch + g64 * share * d_head
    lse_ptr += (b64 * heads + g64 * share) * s
    delta_ptr += (b64 * heads + g64 * share) * s
    # all query heads in one loop, so that loads run ahead from one to the next
    for step in range(share * tiles):
        r = (step // tiles).to(tl.int64)
        i = low + step % tiles * M
        query = i + tl.arange(0, M)
        q = _rows(q_ptr + r * q_head, i, q_row, s, d, M, 0, D, False, EVEN)
        d_out = _rows(d_out_ptr + r * d_head, i, d_row, s, e, M, 0, E, False, EVEN_E)
        x = dot(k, tl.trans(q), None, EXACT)
        if D2 > 0:
            q2 = _rows(q_ptr + r * q_head, i, q_row, s, d, M, D, D2, False, EVEN)
            x = dot(k2, tl.trans(q2), x, EXACT)
        z, bent = _logits(x, scale, cap, CAPPED)
        lse = tl.load(lse_ptr + r * s + query, mask=query < s, other=0.0) * LOG2E
        delta = tl.load(delta_ptr + r * s + query, mask=query < s, other=0.0)
        p = tl.exp2(z - lse[None, :])
        # One loop runs over masked and unmasked tiles here, so the mask is decided at run time.
        if (i < begin) | (i + M > end):
            p = tl.where(
                (query[None, :] >= first[:, None]) & (query[None, :] < last[:, None]), p, 0.0
            )
        d_v = dot(cast(p, d_out.dtype), d_out, d_v, EXACT)
        d_z = p * (dot(v, tl.trans(d_out), None, EXACT) - delta[None, :])
        if CAPPED:
            d_z *= 1 - bent * bent
        d_x = cast(d_z, q.dtype)
        d_k = dot(d_x, q, d_k, EXACT)
        if D2 > 0:
            d_k2 = dot(d_x, q2, d_k2, EXACT)
    d_k_ptr += b64 * dk_batch + g64 * dk_head
    _store(d_k_ptr, d_k * scale, start, dk_row, t, d, N, 0, D)
    if D2 > 0:
        _store(d_k_ptr, d_k2 * scale, start, dk_row, t, d, N, D, D2)
    _store(d_v_ptr + b64 * dv_batch + g64 * dv_head, d_v, start, dv_row, t, e, N, 0, E)


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Seen,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values, and `delta` [b, n, s] in fp32, of which those
    of sinks are made.
    """
    b, n, s, d = q.shape
    _, g, t, e = v.shape
    d_q = token_major(q, d)
    d_k = token_major(k, d)
    d_v = token_major(v, e)
    delta = torch.empty_like(lse)
    # Gradients of fp32 outputs are rounded to the operands' dtype, which tensor cores need.
    q, k, v, d_out = map(dense_rows, (q, k, v, d_out.to(q.dtype)))
    numbers = (n, n // g, s, t, d, e, *seen.limits(s, t), scale, softcap)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    with on_device_of(q):
        if d_q.numel():
            tile = tile_for("queries", q, v, seen.masks_left)
            queries_kernel[(ceil_div(s, tile.queries), b * n)](
                q,
                k,
                v,
                seen.table,
                out,
                lse,
                d_out,
                None if d_lse is None else d_lse.contiguous(),
                d_q,
                delta,
                *inputs,
                *out.stride()[:3],
                *d_out.stride()[:3],
                *d_q.stride()[:3],
                *numbers,
                WITH_LSE=d_lse is not None,
                LEFT=seen.masks_left,
                **constants(q, v, seen, softcap, tile),
            )
        if d_k.numel():
            tile = tile_for("keys", q, v, seen.masks_left)
            keys_kernel[(ceil_div(t, tile.keys), b * g)](
                q,
                k,
                v,
                seen.table,
                lse,
                delta,
                d_out,
                d_k,
                d_v,
                *inputs,
                *d_out.stride()[:3],
                *d_k.stride()[:3],
                *d_v.stride()[:3],
                *numbers,
                RIGHT=seen.masks_right,
                **constants(q, v, seen, softcap, tile),
            )
    return d_q, d_k, d_v, delta
