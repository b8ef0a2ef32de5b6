"""A GEMM that also writes statistics of each tile of logits, so that the loss reads no logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.cross_entropy.triton import LOG2E, bend
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.linear_cross_entropy.tiles import Tile
from mtrain_kernels.runtime import cast, ceil_div, dot, on_device_of

GROUP = 16
"""Tiles of tokens that pass over the same columns one after the other: weights and hidden states
stay in L2.
"""


@triton.jit
def _place(GROUP: tl.constexpr, tall, wide):
    """Return the row and column of this program's tile, `GROUP` rows of tiles at a time."""
    tile = tl.program_id(0)
    begin = tile // (GROUP * wide) * GROUP
    rows = tl.minimum(tall - begin, GROUP)
    inner = tile % (GROUP * wide)
    return begin + inner % rows, inner // rows


@kernel
def product_kernel(
    x_ptr, weight_ptr, labels_ptr, class_weights_ptr, logits_ptr, out_ptr,
    rows, columns, k, x_stride, weight_stride, logits_stride, first, soft_cap,
    KEPT: tl.constexpr, SMOOTHED: tl.constexpr, WEIGHED: tl.constexpr, CAPPED: tl.constexpr,
    RANKED: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of logits, kept or not, and its part of the rows' `row_statistics`.

    Statistics are of the logits as they are rounded, kept or not. `out_ptr` is [3 or 5, tiles of
    columns, rows]: log-sum-exp, logit of the label, sum, largest logit and its first column.
    """
    down, across = _place(GROUP, tl.cdiv(rows, M), tl.cdiv(columns, N))
    r = down * M + tl.arange(0, M)
    c = across * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    left = x_ptr + r.to(tl.int64)[:, None] * x_stride + inner[None, :]
    right = weight_ptr + c.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    x = tl.zeros((M, N), tl.float32)
    for i in range(0, k, K):
        if EVEN:
            a = tl.load(left + i, mask=(r < rows)[:, None], other=0.0)
            b = tl.load(right + i, mask=(c < columns)[None, :], other=0.0)
        else:
            here = i + inner < k
            a = tl.load(left + i, mask=(r < rows)[:, None] & here[None, :], other=0.0)
            b = tl.load(right + i, mask=(c < columns)[None, :] & here[:, None], other=0.0)
        x = dot(a, b, x, EXACT)
    held = (c < columns)[None, :]
    # Statistics are of the stored numbers, so that the probabilities of the backward add up to 1.
    rounded = cast(x, x_ptr.dtype.element_ty)
    if KEPT:
        place = logits_ptr + r.to(tl.int64)[:, None] * logits_stride + c[None, :]
        tl.store(place, rounded, mask=(r < rows)[:, None] & held)
    x = tl.where(held, rounded.to(tl.float32), -float("inf"))
    out = out_ptr + across.to(tl.int64) * rows + r
    part = tl.cdiv(columns, N).to(tl.int64) * rows
    if RANKED:  # of what is not capped: a bound makes different logits equal
        top = tl.max(x, axis=1)
        at = tl.min(tl.where(x == top[:, None], c[None, :], columns), axis=1)
        tl.store(out + 3 * part, top, mask=r < rows)
        # A column number is exact in fp32 up to 2^24.
        tl.store(out + 4 * part, at.to(tl.float32), mask=r < rows)
    if CAPPED:
        x = soft_cap - 2.0 * soft_cap * bend(x, 2.0 * LOG2E / soft_cap, False)
        x = tl.where(held, x, -float("inf"))
    label = tl.load(labels_ptr + r, mask=r < rows, other=-1) - first
    # the label may be another rank's, and behind these columns
    target = (c[None, :] == label[:, None]) & held
    tl.store(out + part, tl.sum(tl.where(target, x, 0.0), axis=1), mask=r < rows)
    if SMOOTHED:
        each = tl.where(held, x, 0.0)
        if WEIGHED:
            each *= tl.load(class_weights_ptr + first + c, mask=c < columns, other=0.0)[None, :]
        tl.store(out + 2 * part, tl.sum(each, axis=1), mask=r < rows)
    most = tl.max(x, axis=1)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    tl.store(out, shift + tl.log(tl.sum(tl.exp(x - shift[:, None]), axis=1)), mask=r < rows)


def product_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int,
    terms: Terms,
    tile: Tile,
    *,
    logits: Tensor | None,
    class_weights: Tensor | None = None,
    ranked: bool = False,
) -> Tensor:
    """Return the `row_statistics` of `hidden` [t, h] times `weight` [v_local, h].

    The product is written to `logits`, if given.

    Both operands have a unit stride along h, and `logits` [t, v_local] along the columns.
    """
    rows, k = hidden.shape
    columns = weight.shape[0]
    tiles = ceil_div(columns, tile.columns)
    found = torch.empty(
        (5 if ranked else 3, tiles, rows), dtype=torch.float32, device=hidden.device
    )
    if rows and columns:
        with on_device_of(hidden):
            product_kernel[(ceil_div(rows, tile.tokens) * tiles,)](
                hidden, weight, labels, class_weights, logits, found,
                rows, columns, k, hidden.stride(0), weight.stride(0),
                0 if logits is None else logits.stride(0),
                first, terms.soft_cap,
                KEPT=logits is not None, SMOOTHED=terms.label_smoothing > 0,
                WEIGHED=class_weights is not None,
                CAPPED=terms.soft_cap > 0, RANKED=ranked, EVEN=k % tile.step == 0,
                EXACT=hidden.dtype == torch.float32, M=tile.tokens, N=tile.columns, K=tile.step,
                GROUP=GROUP,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return _merged(found, labels - first, columns, terms.label_smoothing > 0)


def _merged(found: Tensor, label: Tensor, columns: int, smoothed: bool) -> Tensor:
    """Merge the statistics of tiles to those of all columns of a rank.

    `label` [t] is relative to the first column.
    """
    target = found[1].sum(0)
    parts = [
        found[0].logsumexp(0),
        target,
        found[2].sum(0) if smoothed else torch.zeros_like(target),
    ]
    if len(found) > 3:
        top = found[3].amax(0) if found.shape[1] else torch.full_like(parts[0], -torch.inf)
        place = found[4].where(found[3] == top, columns)
        at = place.amin(0) if found.shape[1] else torch.full_like(top, columns)
        parts += [top, (at == label).float() - (label >= columns).float()]
    return torch.stack(parts)
