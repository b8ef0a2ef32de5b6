"""Forward of fused attention: scores stay on the chip, and key tiles that no query of a tile sees
are skipped.

Each query sees an interval of keys: [i + shift - left, i + shift + right], or the interval in a
table. Each key is seen by an interval of queries. A tile of queries therefore sees a run of key
tiles in full, which need no mask, and a few partly masked tiles at both ends of the run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.attention.seen import Seen
from mtrain_kernels.attention.tiles import Tile, Widths, tile_for
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, dot, on_device_of

# Log-sum-exp of a query without visible keys; finite, because other code subtracts it.
HIDDEN = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALL = tl.constexpr(0.1)  # a polynomial below; above, 1 - exp(-2x) keeps enough digits


@triton.jit
def _tanh(x):
    """Return tanh in fp32 with a relative error of about 1e-6."""
    u = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - u) / (1 + u)
    far = tl.where(x < 0, -far, far)
    xx = x * x
    return tl.where(tl.abs(x) < SMALL, x * (1 + xx * (-1 / 3 + xx * (2 / 15))), far)


@triton.jit
def _logits(x, scale, cap, CAPPED: tl.constexpr):
    """Return the logits of products `x` in base 2, and the tanh of softcapped ones, from which the
    backward computes the slope 1 - tanh^2.
    """
    if CAPPED:
        bent = _tanh(x * (scale / cap))
        return bent * (cap * LOG2E), bent
    return x * (scale * LOG2E), x


@triton.jit
def _rows(
    ptr, start, stride, rows, columns, R: tl.constexpr, AT: tl.constexpr, C: tl.constexpr,
    INSIDE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Load rows from `start`, columns from AT of a matrix [rows, columns], with zeros outside."""
    row = tl.arange(0, R)
    column = AT + tl.arange(0, C)
    # Only the start needs int64; offsets inside a tile are small.
    at = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    # Decided at compile time: loads of full tiles carry no predicates.
    if INSIDE and EVEN:
        return tl.load(at)
    if EVEN:
        return tl.load(at, mask=(start + row < rows)[:, None], other=0.0)
    return tl.load(at, mask=(start + row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _store(
    ptr, x, start, stride, rows, columns, R: tl.constexpr, AT: tl.constexpr, C: tl.constexpr
):
    row = tl.arange(0, R)
    column = AT + tl.arange(0, C)
    at = ptr + tl.cast(start, tl.int64) * stride + row[:, None] * stride + column[None, :]
    tl.store(
        at,
        cast(x, ptr.dtype.element_ty),
        mask=(start + row < rows)[:, None] & (column < columns)[None, :],
    )


@triton.jit
def _interval(at, table_ptr, size, others, before, after, TABLE: tl.constexpr):
    """Return the half-open interval of `others` that each row in `at` interacts with."""
    inside = at < size
    if TABLE:
        # Rows outside get an empty interval, from which no tile is visited.
        first = tl.load(table_ptr + at, mask=inside, other=others)
        last = tl.load(table_ptr + size + at, mask=inside, other=0)
    else:
        first = tl.maximum(at - before, 0)
        last = tl.where(inside, tl.minimum(at + after + 1, others), 0)
    return first, last


@triton.jit
def _phases(first, last, inside, others, T: tl.constexpr):
    """Return four multiples of T: the begin of the tiles that some row sees, the begin and end of
    those that every row sees, and the end of those that some row sees.
    """
    # Some row sees the tiles from the least first key to the greatest last one.
    low = tl.min(tl.where(inside, first, others), 0) // T * T
    high = tl.max(last, 0)
    # Every row sees those from the greatest first key, rounded up, to the least last one, rounded
    # down.
    begin = tl.cdiv(tl.max(tl.where(inside, first, 0), 0), T) * T
    end = tl.min(tl.where(inside, last, others), 0) // T * T
    # Kept in order where no tile is seen by all, so that none is visited twice.
    begin = tl.minimum(tl.maximum(begin, low), tl.maximum(high, low))
    return low, begin, tl.maximum(end, begin), high


@triton.jit
def _over_keys(
    low, high, q, q2, total, top, acc, k_ptr, v_ptr, k_stride, v_stride, first, last, t, d, e,
    scale, cap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, EVEN: tl.constexpr,
    EVEN_E: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add key tiles in [low, high) to the softmax of the queries `q`, whose second part `q2` has D2
    columns.
    """
    for j in range(low, high, N):
        k = _rows(k_ptr, j, k_stride, t, d, N, 0, D, not MASKED, EVEN)
        x = dot(q, tl.trans(k), None, EXACT)
        if D2 > 0:
            k2 = _rows(k_ptr, j, k_stride, t, d, N, D, D2, not MASKED, EVEN)
            x = dot(q2, tl.trans(k2), x, EXACT)
        z, _ = _logits(x, scale, cap, CAPPED)
        if MASKED:
            key = j + tl.arange(0, N)
            z = tl.where(
                (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None]), z, float("-inf")
            )
        # Online softmax: as the maximum grows, the sums so far shrink by the same factor.
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(p, 1)
        v = _rows(v_ptr, j, v_stride, t, e, N, 0, E, not MASKED, EVEN_E)
        acc = dot(cast(p, v.dtype), v, acc * shrunk[:, None], EXACT)
        top = higher
    return total, top, acc


@kernel
def forward_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, table_ptr, out_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    heads, share, s, t, d, e, left, right, shift, scale, cap,
    SINK: tl.constexpr, TABLE: tl.constexpr, LEFT: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    EVEN: tl.constexpr, EVEN_E: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute out = softmax over the keys that a query sees, and the logarithm of its
    denominator.
    """
    # under a causal mask the last ones take longest
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    g64 = (h // share).to(tl.int64)
    k_ptr += b64 * k_batch + g64 * k_head
    v_ptr += b64 * v_batch + g64 * v_head
    q_ptr += b64 * q_batch + h64 * q_head
    q = _rows(q_ptr, start, q_row, s, d, M, 0, D, False, EVEN)
    q2 = q
    if D2 > 0:
        q2 = _rows(q_ptr, start, q_row, s, d, M, D, D2, False, EVEN)
    row = start + tl.arange(0, M)
    inside = row < s
    first, last = _interval(row, table_ptr, s, t, left - shift, right + shift, TABLE)
    low, begin, end, high = _phases(first, last, inside, t, N)
    # Finite, so that the factor of a row that has seen nothing yet is 1 and not NaN.
    top = tl.zeros([M], tl.float32) + HIDDEN
    total = tl.zeros([M], tl.float32)
    if SINK:
        # A key of value zero: it enters the denominator and not the accumulator.
        sink = tl.load(sink_ptr + h).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    acc = tl.zeros([M, E], tl.float32)
    if LEFT:
        total, top, acc = _over_keys(
            low, begin, q, q2, total, top, acc, k_ptr, v_ptr, k_row, v_row, first, last, t, d, e,
            scale, cap,
            True, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
        )  # fmt: skip
    total, top, acc = _over_keys(
        begin, end, q, q2, total, top, acc, k_ptr, v_ptr, k_row, v_row, first, last, t, d, e,
        scale, cap,
        False, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
    )  # fmt: skip
    total, top, acc = _over_keys(
        end, high, q, q2, total, top, acc, k_ptr, v_ptr, k_row, v_row, first, last, t, d, e, scale,
        cap,
        True, CAPPED, EXACT, EVEN, EVEN_E, D, D2, E, N,
    )  # fmt: skip
    seen = total != 0  # not a number counts as seen
    total = tl.where(seen, total, 1.0)
    # Natural logarithms, as ring attention merges parts by logaddexp.
    lse = tl.where(seen, (top + tl.log2(total)) * LN2, HIDDEN)
    tl.store(lse_ptr + (b64 * heads + h64) * s + row, lse, mask=inside)
    out_ptr += b64 * o_batch + h64 * o_head
    _store(out_ptr, acc / total[:, None], start, o_row, s, e, M, 0, E)


def token_major(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty [b, n, s, width] whose memory is [s, b, n, width], which the layer after
    attention reads as a view.
    """
    b, n, s, _ = like.shape
    return like.new_empty((s, b, n, width), dtype=dtype or like.dtype).permute(1, 2, 0, 3)


def dense_rows(x: Tensor) -> Tensor:
    """Return `x` with the elements of a row side by side, copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def constants(q: Tensor, v: Tensor, seen: Seen, softcap: float, tile: Tile) -> dict[str, Any]:
    """Return the constants that the kernels are compiled for."""
    widths = Widths.of(q.shape[-1], v.shape[-1])
    return {
        "TABLE": seen.table is not None,
        "CAPPED": softcap > 0,
        "EXACT": q.dtype == torch.float32,
        "EVEN": widths.even,
        "EVEN_E": widths.even_value,
        "D": widths.first,
        "D2": widths.second,
        "E": widths.value,
        "M": tile.queries,
        "N": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seen: Seen,
    scale: float,
    softcap: float,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Return output [b, n, s, e], fp32 if `wide`, and log-sum-exps [b, n, s] in fp32."""
    b, n, s, d = q.shape
    _, g, t, e = v.shape
    out = token_major(q, e, torch.float32 if wide else None)
    lse = q.new_empty((b, n, s), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    q, k, v = map(dense_rows, (q, k, v))
    tile = tile_for("forward", q, v, seen.masks_left)
    with on_device_of(q):
        forward_kernel[(ceil_div(s, tile.queries), b * n)](
            q,
            k,
            v,
            None if sink is None else sink.contiguous(),
            seen.table,
            out,
            lse,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *out.stride()[:3],
            n,
            n // g,
            s,
            t,
            d,
            e,
            *seen.limits(s, t),
            scale,
            softcap,
            SINK=sink is not None,
            LEFT=seen.masks_left,
            **constants(q, v, seen, softcap, tile),
        )
    return out, lse
