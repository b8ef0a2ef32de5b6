"""Cross entropy on a GPU: one pass over a row for its statistics, one for the gradient, in place if
wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.cross_entropy.reference import Terms, shares
from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import INTERPRETED, cast, ceil_div, exp2, on_device_of, reciprocal

COLUMNS = 8192  # of a row in the registers of one program
LOG2E = tl.constexpr(1.4426950408889634)
RECIPROCALS = tl.constexpr(  # of four numbers between 1 and 2^31, by one of their product
    "{ .reg .f32 a, b, r; mul.rn.f32 a, $4, $5; mul.rn.f32 b, $6, $7; mul.rn.f32 r, a, b;"
    " rcp.approx.ftz.f32 r, r; mul.rn.f32 b, r, b; mul.rn.f32 a, r, a; mul.rn.f32 $0, b, $5;"
    " mul.rn.f32 $1, b, $4; mul.rn.f32 $2, a, $7; mul.rn.f32 $3, a, $6; }"
)


@triton.jit
def bend(x, slope, SHARED: tl.constexpr):
    """Return 1 / (1 + 2^(slope x)): the tanh of x / c is 1 - 2 bend for a `slope` of 2 log2(e) / c,
    to 1e-6 of one.

    With `SHARED` four neighbours share a division, and become not a number together: for logits of
    one row, of which each thread has four (a block of 128 columns and more).
    """
    # With at most 2^30 the product of four stays finite, and tanh has long become 1.
    above = 1.0 + exp2(tl.minimum(x * slope, 30.0, propagate_nan=tl.PropagateNan.ALL))
    if INTERPRETED or not SHARED:
        return reciprocal(above)
    return tl.inline_asm_elementwise(
        RECIPROCALS, "=&f,=&f,=&f,=&f,f,f,f,f", [above], tl.float32, True, 4
    )


@triton.jit
def _columns(
    logits_ptr, class_weights_ptr, start, columns, soft_cap, most, exponentials, total, top, at,
    COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    SMOOTHED: tl.constexpr, WEIGHED: tl.constexpr, CAPPED: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Add a block of columns to the running statistics of each eighth of it, which one thread
    holds.
    """
    # Eight neighbours for each thread are one load of 16 bytes in half precision.
    column = start + tl.arange(0, COLUMNS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if WHOLE:
        x = tl.load(logits_ptr + column).to(tl.float32)
    else:
        x = tl.load(logits_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    if RANKED:  # of what is not capped: a bound makes different logits equal
        here = tl.max(x, axis=1)
        # Strictly greater, so that the first of equal maxima stays.
        at = tl.where(here > top, start + tl.arange(0, COLUMNS // 8) * 8, at)
        top = tl.maximum(top, here)
    if CAPPED:
        x = soft_cap - 2.0 * soft_cap * bend(x, 2.0 * LOG2E / soft_cap, COLUMNS >= 128)
        if not WHOLE:
            # The cap has turned the -inf of absent columns into -soft_cap.
            x = tl.where(column < columns, x, -float("inf"))
    if SMOOTHED:
        part = x
        if not WHOLE:
            part = tl.where(column < columns, x, 0.0)
        if WEIGHED:
            part *= tl.load(class_weights_ptr + column, mask=column < columns, other=0.0)
        total += tl.sum(part, axis=1)
    following = tl.maximum(most, tl.max(x, axis=1))
    # -inf minus -inf would be NaN in threads that have met no column yet.
    shift = _finite(following) * LOG2E
    exponentials *= exp2(most * LOG2E - shift)
    exponentials += tl.sum(exp2(x * LOG2E - shift[:, None]), axis=1)
    return following, exponentials, total, top, at


@triton.jit
def _finite(x):
    """Return the maxima to subtract; 0 for infinite ones."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@kernel
def statistics_kernel(
    logits_ptr, labels_ptr, class_weights_ptr, out_ptr, rows, columns, stride, first, soft_cap,
    COLUMNS: tl.constexpr,
    SMOOTHED: tl.constexpr, WEIGHED: tl.constexpr, CAPPED: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Reduce one row per program: each thread keeps a running maximum and sum of exponentials,
    merged at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    if WEIGHED:
        class_weights_ptr += first
    exponentials = tl.zeros((COLUMNS // 8,), tl.float32)
    total = tl.zeros((COLUMNS // 8,), tl.float32)
    most = tl.full((COLUMNS // 8,), -float("inf"), tl.float32)
    top = most
    at = tl.zeros((COLUMNS // 8,), tl.int32) + columns
    whole = columns // COLUMNS * COLUMNS
    for start in range(0, whole, COLUMNS):
        most, exponentials, total, top, at = _columns(
            logits_ptr, class_weights_ptr, start, columns, soft_cap, most, exponentials, total,
            top, at,
            COLUMNS, True, SMOOTHED, WEIGHED, CAPPED, RANKED,
        )  # fmt: skip
    if whole < columns:
        most, exponentials, total, top, at = _columns(
            logits_ptr, class_weights_ptr, whole, columns, soft_cap, most, exponentials, total,
            top, at,
            COLUMNS, False, SMOOTHED, WEIGHED, CAPPED, RANKED,
        )  # fmt: skip
    label = tl.load(labels_ptr + row) - first
    here = (label >= 0) & (label < columns)
    target = tl.load(logits_ptr + label, mask=here, other=0.0).to(tl.float32)
    if CAPPED:
        target = soft_cap - 2.0 * soft_cap * bend(target, 2.0 * LOG2E / soft_cap, False)
    largest = _finite(tl.max(most, axis=0))
    exponentials = tl.sum(exponentials * exp2(most * LOG2E - largest * LOG2E), axis=0)
    tl.store(out_ptr + row, largest + tl.log2(exponentials) / LOG2E)
    tl.store(out_ptr + rows + row, tl.where(here, target, 0.0))
    tl.store(out_ptr + 2 * rows + row, tl.sum(total, axis=0))
    if RANKED:
        best = tl.max(top, axis=0)
        # Threads remember only where their best eight columns begin: the exact place is looked up
        # in them.
        column = tl.min(tl.where(top == best, at, columns), axis=0) + tl.arange(0, 8)
        x = tl.load(logits_ptr + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        place = tl.min(tl.where(x == best, column, columns), axis=0)
        tl.store(out_ptr + 3 * rows + row, best)
        tl.store(
            out_ptr + 4 * rows + row,
            tl.where(label >= columns, -1.0, tl.where(label == place, 1.0, 0.0)),
        )


@kernel
def gradient_kernel(
    logits_ptr, labels_ptr, lse_ptr, factor_ptr, share_ptr, hit_ptr, class_weights_ptr, out_ptr,
    columns, stride, out_stride, first, ignore_index, smoothing, smoothing_share, z_loss, soft_cap,
    COLUMNS: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, Z_LOSS: tl.constexpr,
    WEIGHED: tl.constexpr,
):  # fmt: skip
    """Compute a part of one row per program; `out_ptr` may be `logits_ptr`.

    Ignored rows become zeros, whatever they hold.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row)
    factor = tl.load(factor_ptr + row)
    x = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0
    hit = 1.0 - smoothing
    if WEIGHED:
        share = tl.load(share_ptr + row)
        hit = tl.load(hit_ptr + row)
    elif Z_LOSS:  # not always, as 0 times an infinite log-sum-exp is not a number
        share = 1.0 + 2.0 * z_loss * lse
    if CAPPED:
        bent = bend(x, 2.0 * LOG2E / soft_cap, COLUMNS >= 128)
        x = soft_cap - 2.0 * soft_cap * bent
        factor *= 4.0  # of the slope, which is 4 bent (1 - bent)
    gradient = exp2((x - lse) * LOG2E) * (share * factor)
    if SMOOTHED and WEIGHED:
        each = tl.load(class_weights_ptr + first + column, mask=inside, other=0.0)
        gradient -= each * (smoothing_share * factor)
    elif SMOOTHED:
        gradient -= smoothing_share * factor
    beside = label - first
    # compared with every column
    place = tl.where((beside >= 0) & (beside < columns), beside, -1).to(tl.int32)
    gradient = tl.where(column == place, gradient - hit * factor, gradient)
    if CAPPED:
        gradient *= bent - bent * bent
    # A selection and the last step, so that it also removes NaN.
    gradient = tl.where(label == ignore_index, 0.0, gradient)
    tl.store(
        out_ptr + row * out_stride + column, cast(gradient, out_ptr.dtype.element_ty), mask=inside
    )


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    first: int,
    terms: Terms,
    *,
    class_weights: Tensor | None = None,
    ranked: bool = False,
) -> Tensor:
    """Launch the statistics kernel; arguments and result as in the reference, `logits` with unit
    column stride.
    """
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
    """Launch the gradient kernel and returns `out`, which may be `logits`; the rest as in the
    reference.
    """
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
                SMOOTHED=terms.label_smoothing > 0,
                CAPPED=terms.soft_cap > 0,
                Z_LOSS=terms.z_loss > 0,
                WEIGHED=class_weights is not None,
                num_warps=warps,
            )
    return out


def _block(columns: int) -> tuple[int, int]:
    block = min(COLUMNS, max(triton.next_power_of_2(columns), 16))
    return block, max(1, min(16, block // 512))
