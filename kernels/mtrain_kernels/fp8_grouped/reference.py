"""Definition of what experts multiply in FP8, in plain torch: each group's rows and weight
quantised by themselves.

A group's rows have one scale (`tensorwise`), or one for 128 elements of a row, and transposed for
128 rows of the group; a weight has one, or one for 128 x 128. All are powers of two: so no element
that is far above zero is rounded otherwise because of the rows next to it, which other layouts put
together in another way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain_kernels.activation.reference import activation
from mtrain_kernels.fp8_linear.reference import scaled_product
from mtrain_kernels.quantize import reference as formats
from mtrain_kernels.quantize.formats import FORMATS

BLOCK = 128
ROWS = "1x128_power_of_two"
SQUARES = "128x128_power_of_two"


def blocks_of(rows: int, groups: int) -> int:
    """Return the most blocks of 128 rows, each of one group, that `rows` rows can take, however
    long each group is.
    """
    # Every group leaves at most 127 rows of its last block unused.
    return max(1, (rows + (BLOCK - 1) * groups) // BLOCK)


def quantize_rows(
    x: Tensor,
    share: Tensor | None,
    ends: Tensor,
    amax: Tensor | None,
    format: str,
    one: bool,
    swiglu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes [r, k] and scales, both transposed, [k, 128 b], and each group's amax [g], empty
    without `one`.

    `x` [r, k], or with `swiglu` [r, 2 k], of which the activation is quantised, times `share` [r].
    `ends` [g] says behind which row each group ends. With `one` scales are [g], from `amax` [g]
    where it is given; else [r, ceil(k / 128)] and transposed [k, b], b being `blocks_of`.
    Transposed, a group begins with a block, and what is behind its rows is zero; rows of nobody
    have the code zero.
    """
    x = activation(x, "swiglu", weight=share) if swiglu else x
    rows, width = x.shape
    blocks = blocks_of(rows, ends.shape[0])
    dtype = FORMATS[format].dtype
    codes = x.new_zeros((rows, width), dtype=dtype)
    turned = x.new_zeros((width, blocks * BLOCK), dtype=dtype)
    if one:
        found = [formats.finite_amax(part) for _, part in parts(x, ends)]
        amax = torch.stack(found) if amax is None else amax
        m = formats.multiplier(amax, format, "power_of_two")
        scale = turned_scale = 1 / m
    else:
        scale = x.new_ones((rows, -(-width // BLOCK)), dtype=torch.float32)
        turned_scale = x.new_ones((width, blocks), dtype=torch.float32)
    at = 0
    for g, (begin, part) in enumerate(parts(x, ends)):
        mine = slice(begin, begin + len(part))
        there = slice(at * BLOCK, at * BLOCK + len(part))
        count = -(-len(part) // BLOCK)
        if one:
            q = formats.encode(part.float() * m[g], format)
            codes[mine] = q
            turned[:, there] = q.T
        elif count:
            quantised = formats.quantize_blocks(part, format, ROWS, True)
            codes[mine], scale[mine], turned[:, there], turned_scale[:, at : at + count] = quantised
        at += count
    return (
        codes,
        scale,
        turned,
        turned_scale,
        amax if amax is not None else x.new_empty(0, dtype=torch.float32),
    )


def quantize_weights(
    weights: Sequence[Tensor], format: str, one: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [g, n, k] and scales, and both transposed: scales [g], or [g, ceil(n / 128),
    ceil(k / 128)].
    """
    if one:
        m = [
            formats.multiplier(formats.finite_amax(w).view(1), format, "power_of_two")
            for w in weights
        ]
        found = [
            (q[0], 1 / each, q[2], 1 / each)
            for w, each in zip(weights, m, strict=True)
            for q in [formats.quantize_tensorwise(w, each, format, True)]
        ]
    else:
        found = [formats.quantize_blocks(w, format, SQUARES, True) for w in weights]
    q, scale, turned, turned_scale = (_stack(each) for each in zip(*found, strict=True))
    return (
        q,
        scale.view(-1) if one else scale,
        turned,
        turned_scale.view(-1) if one else turned_scale,
    )


def rows_product(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `y_r = W_g x_r` of the numbers encoded by `x` [r, k] and `w` [g, n, k]: [r, n], zeros
    behind the last group.
    """
    y = x.new_zeros((x.shape[0], w.shape[1]), dtype=dtype)
    for g, (begin, part) in enumerate(parts(x, ends)):
        mine = slice(begin, begin + len(part))
        if len(part):
            left = x_scale[g : g + 1] if x_scale.ndim == 1 else x_scale[mine]
            right = w_scale[g : g + 1] if w_scale.ndim == 1 else w_scale[g]
            y[mine] = scaled_product(part, left, w[g], right, dtype)
    return y


def weights_product(d: Tensor, d_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient [g, n, k] of weights in fp32, from transposed codes `d` [n, 128 b] and
    `x` [k, 128 b].
    """
    rows = d.shape[1]
    at = 0
    made = d.new_zeros((ends.shape[0], d.shape[0], x.shape[0]), dtype=torch.float32)
    # Only the bounds of groups matter here, hence rows without elements.
    for g, (_, part) in enumerate(parts(torch.empty(rows, 0), ends)):
        count = -(-len(part) // BLOCK)
        mine = slice(at * BLOCK, (at + count) * BLOCK)
        blocks = slice(at, at + count)
        if count:
            left, right = (
                s[g : g + 1] if s.ndim == 1 else s[:, blocks] for s in (d_scale, x_scale)
            )
            made[g] = scaled_product(d[:, mine], left, x[:, mine], right, torch.float32)
        at += count
    return made


def parts(x: Tensor, ends: Tensor) -> list[tuple[int, Tensor]]:
    """Return each group's first row and its rows of `x`, without rows beyond the end of `x`, as
    kernels do.
    """
    last = [min(end, x.shape[0]) for end in ends.tolist()]
    return [
        (begin, x[begin : max(begin, end)]) for begin, end in zip([0, *last], last, strict=False)
    ]


def _stack(each: Sequence[Tensor]) -> Tensor:
    if each[0].element_size() > 1:
        return torch.stack(list(each))
    # As bytes, since few operators of torch take FP8.
    return torch.stack([t.view(torch.uint8) for t in each]).view(each[0].dtype)
