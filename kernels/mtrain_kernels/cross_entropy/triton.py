"""Cross entropy on a GPU: one pass over a row for its statistics, one for the gradient, in place if wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.cross_entropy.reference import Terms, shares
from mtrain_kernels.runtime import cast, ceil_div, on_device_of

COLUMNS = 8192  # of a row in the registers of one program


@triton.jit
def tanh(x):
    """Right to 1e-7 of one, also at infinity, which the quotient of exponentials would not be."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def statistics_kernel(
    logits_ptr,
    labels_ptr,
    class_weights_ptr,
    out_ptr,
    rows,
    columns,
    stride,
    first,
    soft_cap,
    COLUMNS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WEIGHED: tl.constexpr,
    CAPPED: tl.constexpr,
    RANKED: tl.constexpr,
):
    """One row per program: running maximum and sum of exponentials; infinite maxima are not subtracted."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    shift = 0.0
    exponentials = 0.0
    total = 0.0
    seen = -float("inf")
    top = -float("inf")
    place = 0
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(logits_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        if RANKED:  # of what is not capped: a bound makes different logits equal
            most = tl.max(x, axis=0)
            if most > top:
                place = tl.min(tl.where(x == most, column, columns), axis=0)
            top = tl.maximum(top, most)
        if CAPPED:
            x = tl.where(column < columns, soft_cap * tanh(x / soft_cap), -float("inf"))
        if SMOOTHED:
            part = tl.where(column < columns, x, 0.0)
            if WEIGHED:
                part *= tl.load(class_weights_ptr + first + column, mask=column < columns, other=0.0)
            total += tl.sum(part, axis=0)
        seen = tl.maximum(seen, tl.max(x, axis=0))
        following = tl.where(tl.abs(seen) == float("inf"), 0.0, seen)
        exponentials = exponentials * tl.exp(shift - following) + tl.sum(tl.exp(x - following), axis=0)
        shift = following
    label = tl.load(labels_ptr + row) - first
    here = (label >= 0) & (label < columns)
    target = tl.load(logits_ptr + label, mask=here, other=0.0).to(tl.float32)
    if CAPPED:
        target = soft_cap * tanh(target / soft_cap)
    tl.store(out_ptr + row, shift + tl.log(exponentials))
    tl.store(out_ptr + rows + row, tl.where(here, target, 0.0))
    tl.store(out_ptr + 2 * rows + row, total)
    if RANKED:
        tl.store(out_ptr + 3 * rows + row, top)
        tl.store(out_ptr + 4 * rows + row, tl.where(label >= columns, -1.0, tl.where(label == place, 1.0, 0.0)))


@triton.jit
def gradient_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    factor_ptr,
    share_ptr,
    hit_ptr,
    class_weights_ptr,
    out_ptr,
    columns,
    stride,
    out_stride,
    first,
    ignore_index,
    smoothing,
    smoothing_share,
    z_loss,
    soft_cap,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """A part of one row per program; `out_ptr` may be `logits_ptr`. Ignored rows become zeros, whatever they hold."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row)
    factor = tl.load(factor_ptr + row)
    x = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        bent = tanh(x / soft_cap)
        x = soft_cap * bent
    gradient = tl.exp(x - lse)
    if WEIGHED:
        gradient *= tl.load(share_ptr + row)
        gradient -= smoothing_share * tl.load(class_weights_ptr + first + column, mask=inside, other=0.0)
        gradient -= tl.where(column == label - first, tl.load(hit_ptr + row), 0.0)
    else:
        if Z_LOSS:  # not always, as 0 times an infinite log-sum-exp is not a number
            gradient *= 1.0 + 2.0 * z_loss * lse
        gradient -= smoothing_share
        gradient -= tl.where(column == label - first, 1.0 - smoothing, 0.0)
    if CAPPED:
        gradient *= 1.0 - bent * bent
    gradient = tl.where(label == ignore_index, 0.0, gradient * factor)
    tl.store(out_ptr + row * out_stride + column, cast(gradient, out_ptr.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    first: int,
    terms: Terms,
    *,
    class_weights: Tensor | None = None,
    ranked: bool = False,
) -> Tensor:
    """Launches the statistics kernel; arguments and result as in the reference, `logits` with unit column stride."""
    rows, columns = logits.shape
    out = logits.new_empty((5 if ranked else 3, rows), dtype=torch.float32)
    if rows:
        block, warps = _block(columns)
        with on_device_of(logits):
            statistics_kernel[(rows,)](
                logits,
                labels,
                class_weights,
                out,
                rows,
                columns,
                logits.stride(0),
                first,
                terms.soft_cap,
                COLUMNS=block,
                SMOOTHED=terms.label_smoothing > 0,
                WEIGHED=class_weights is not None,
                CAPPED=terms.soft_cap > 0,
                RANKED=ranked,
                num_warps=warps,
            )
    return out


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    factors: Tensor,
    first: int,
    terms: Terms,
    out: Tensor,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Launches the gradient kernel and returns `out`, which may be `logits`; the rest as in the reference."""
    rows, columns = logits.shape
    share = hit = None
    if class_weights is not None:
        share, hit = shares(lse, labels, terms, class_weights)
    if logits.numel():
        block, warps = _block(columns)
        with on_device_of(logits):
            gradient_kernel[(rows, ceil_div(columns, block))](
                logits,
                labels,
                lse,
                factors,
                share,
                hit,
                class_weights,
                out,
                columns,
                logits.stride(0),
                out.stride(0),
                first,
                terms.ignore_index,
                terms.label_smoothing,
                terms.label_smoothing / terms.vocab,
                terms.z_loss,
                terms.soft_cap,
                COLUMNS=block,
                CAPPED=terms.soft_cap > 0,
                Z_LOSS=terms.z_loss > 0,
                WEIGHED=class_weights is not None,
                num_warps=warps,
            )
    return out


def _block(columns: int) -> tuple[int, int]:
    block = min(COLUMNS, max(triton.next_power_of_2(columns), 16))
    return block, max(1, min(16, block // 512))
