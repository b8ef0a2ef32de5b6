"""Definition of the grouped linear layer, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[int],
    biases: Sequence[Tensor] | None = None,
    *,
    linear: Callable[..., Tensor] = F.linear,
) -> Tensor:
    """Return rows of `x` in consecutive groups, each through its own layer: `y_g = x_g W_g^T +
    b_g`.

    `x` [r, k], `weights` one [n, k] per group, `rows` how many rows each group has (zero is
    allowed, sum r), `biases` one [n] per group; the result is [r, n] in x's dtype. A group without
    rows gets zero gradients, so that every rank of a reduction takes part in it. `linear` makes the
    products. Raises `ValueError` where counts or shapes do not fit.
    """
    if (
        len(weights) != len(rows)
        or not weights
        or (biases is not None and len(biases) != len(weights))
    ):
        raise ValueError(
            f"{len(weights)} weights and {len(biases or weights)} biases for {len(rows)} groups"
        )
    if x.ndim != 2 or sum(rows) != x.shape[0]:
        raise ValueError(f"groups of {list(rows)} rows do not make up x {tuple(x.shape)}")
    parts = x.split(list(rows))
    return torch.cat(
        [
            linear(part, weight, None if biases is None else biases[g])
            for g, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
    )


def grouped_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    linear: Callable[..., Tensor] = F.linear,
) -> Tensor:
    """Compute `grouped_linear` with the counts on the device: `y_r = W_g x_r + b_g` for the group g
    of row r.

    `x` [r, k], `weight` [g, n, k] or g of [n, k], `counts` [g] integers, `bias` [g, n]; the result
    is [r, n] in x's dtype. Rows behind the last group's belong to nobody and give zeros. Raises
    `ValueError` where the shapes do not fit or the groups have more rows than there are (only the
    reference checks the counts; kernels ignore the rest).
    """
    require_grouped(x, weight, counts, bias)
    rows = counts.tolist()
    held = sum(rows)
    if held > x.shape[0] or min(rows, default=0) < 0:
        raise ValueError(f"groups of {rows} rows do not fit x {tuple(x.shape)}")
    biases = None if bias is None else list(bias)
    y = grouped_linear(x[:held], list(weight), rows, biases, linear=linear)
    return y if held == x.shape[0] else torch.cat([y, y.new_zeros(x.shape[0] - held, y.shape[1])])


def bias_rows(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Return the bias [g, n] of each of `rows` rows' group, zeros behind the last
    group: [rows, n].
    """
    held = sum(counts.tolist())
    every = bias.repeat_interleave(counts, 0, output_size=held)
    return torch.cat([every, bias.new_zeros(rows - held, bias.shape[1])])


def require_grouped(
    x: Tensor, weight: Tensor | Sequence[Tensor], counts: Tensor, bias: Tensor | None
) -> None:
    """Raise `ValueError` unless the arguments of `grouped_gemm` belong together."""
    if not isinstance(weight, Tensor):
        if len({(w.shape, w.dtype, w.device) for w in weight}) != 1:
            raise ValueError(
                f"a list of {len(weight)} weights must hold [n, k] alike, one for each group"
            )
        # A view that stands for the list in the checks below.
        weight = weight[0].expand(len(weight), *weight[0].shape)
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[0] == 0 or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [groups, n, k] and x {tuple(x.shape)} [rows, k]"
        )
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"x {x.dtype}, weight {weight.dtype} and the bias must have one dtype")
    if counts.shape != weight.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"counts {counts.dtype} {tuple(counts.shape)} must be integers ({weight.shape[0]},)"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"bias {tuple(bias.shape)} must be {tuple(weight.shape[:2])}")
    if any(other is not None and other.device != x.device for other in (weight, counts, bias)):
        raise ValueError(f"weight, counts and bias must be on {x.device}, as x")
