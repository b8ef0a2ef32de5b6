"""Definition of the norms, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * w` over the last axis, with `w = weight`, or `1 +
    weight` if zero-centered.

    `x` [..., h], `weight` [h]; the result has x's shape and dtype. Half precision is widened to
    fp32 first, the weight too: `1 + weight` keeps what half precision would round away. Raises
    `ValueError` where the shapes do not fit. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _require_width(x, weight)
    inner = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(inner), weight.shape, _scale(weight.to(inner), zero_centered), eps).to(
        x.dtype
    )


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """Compute `(x - mean(x)) / sqrt(var(x) + eps) * w + bias` over the last axis, with `w` as in
    `rms_norm`.

    `x` [..., h], `weight` [h], `bias` [h] or None; the variance is that of the population. Widening
    and the errors raised are as in `rms_norm`: torch's own LayerNorm adds gradients of
    half-precision weights up in half precision on a CPU. Source: Ba et al. 2016, arXiv:1607.06450.
    """
    _require_width(x, weight)
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(
            f"bias {tuple(bias.shape)} and weight {tuple(weight.shape)} must have one shape"
        )
    inner = torch.promote_types(x.dtype, torch.float32)
    shift = None if bias is None else bias.to(inner)
    return F.layer_norm(
        x.to(inner), weight.shape, _scale(weight.to(inner), zero_centered), shift, eps
    ).to(x.dtype)


def rms_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the new residual `x + residual`, rounded to residual's dtype, and its `rms_norm` in
    x's dtype.

    `x` and `residual` [..., h]; returns (normed, new residual). Raises `ValueError` as `rms_norm`
    does.
    """
    total = _add(x, residual)
    # The sum is normed as it was rounded, in the wider of the two dtypes.
    wide = total.to(torch.promote_types(total.dtype, x.dtype))
    return rms_norm(wide, weight, eps, zero_centered=zero_centered).to(x.dtype), total


def layer_norm_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the new residual `x + residual`, rounded to residual's dtype, and its `layer_norm` in
    x's dtype.

    `x` and `residual` [..., h]; returns (normed, new residual). Raises `ValueError` as `layer_norm`
    does.
    """
    total = _add(x, residual)
    wide = total.to(torch.promote_types(total.dtype, x.dtype))
    return layer_norm(wide, weight, bias, eps, zero_centered=zero_centered).to(x.dtype), total


def _add(x: Tensor, residual: Tensor) -> Tensor:
    if x.shape != residual.shape:
        raise ValueError(
            f"residual {tuple(residual.shape)} and x {tuple(x.shape)} must have one shape"
        )
    return (x + residual).to(residual.dtype)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight + 1 if zero_centered else weight


def _require_width(x: torch.Tensor, weight: Tensor) -> None:
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be the last axis of x {tuple(x.shape)}"
        )
