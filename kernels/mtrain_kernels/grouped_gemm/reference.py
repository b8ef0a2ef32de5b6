"""Definition of the grouped linear layer, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], rows: Sequence[int], biases: Sequence[Tensor] | None = None
) -> Tensor:
    """Rows of `x` in consecutive groups, each through its own layer: `y_g = x_g W_g^T + b_g`.

    `x` [r, k], `weights` one [n, k] per group, `rows` how many rows each group has (zero is allowed, sum r),
    `biases` one [n] per group; the result is [r, n] in x's dtype. A group without rows gets zero gradients, so
    that every rank of a reduction takes part in it. Raises `ValueError` where counts or shapes do not fit.
    """
    if len(weights) != len(rows) or not weights or (biases is not None and len(biases) != len(weights)):
        raise ValueError(f"{len(weights)} weights and {len(biases or weights)} biases for {len(rows)} groups")
    if x.ndim != 2 or sum(rows) != x.shape[0]:
        raise ValueError(f"groups of {list(rows)} rows do not make up x {tuple(x.shape)}")
    parts = x.split(list(rows))
    return torch.cat(
        [
            F.linear(part, weight, None if biases is None else biases[g])
            for g, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
    )
