"""Newton-Schulz and the symmetric product that it is made of, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon."""


def newton_schulz(
    gradient: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Bring the singular values of each matrix near 1, keeping its singular vectors, with `steps`
    quintic steps.

    `gradient` [..., m, n]; the result has its shape and dtype, worked out in `dtype` (at least fp32
    is exact, bf16 is what GPUs multiply fast). Of X over its Frobenius norm, `X = a X + (b A + c
    A^2) X` with `A = X X^T`.
    """
    a, b, c = QUINTIC
    x, tall = normed(gradient, eps, dtype)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(gradient.dtype)


def normed(gradient: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return matrices over their Frobenius norms, in `dtype`, no taller than wide; and whether that
    turned them.
    """
    # The norm is made in fp32: half precision has neither range nor digits for the sum.
    x = gradient.to(torch.promote_types(dtype, torch.float32))
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + eps)).to(dtype)
    # Turned where that makes X X^T the smaller of the two squares.
    tall = x.shape[-2] > x.shape[-1]
    return (x.mT if tall else x), tall


def symmetric_product(
    x: Tensor, added: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Compute `alpha X X^T + beta C` of matrices X [b, m, k] and symmetric ones C [b, m, m],
    rounded once; [b, m, m].
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    product = alpha * (wide @ wide.mT)
    return (product if added is None else product + beta * added.to(wide.dtype)).to(x.dtype)
