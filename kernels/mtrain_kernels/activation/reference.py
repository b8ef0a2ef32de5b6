"""Definition of the activations, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
KINDS = (*GATED, "squared_relu")


def activation(
    x: Tensor, kind: str, *, weight: Tensor | None = None, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return the activation `kind` of `x` [..., f'], times `weight` [...] where given, in x's dtype
    and fp32 inside.

    Gated kinds take gate g and up u from the two halves of the last axis, f' = 2f, and give [...,
    f]: `swiglu` silu(g) u; `geglu` gelu(g) u with erf; `geglu_tanh` the same with the tanh
    approximation; `swiglu_clamped` (u' + 1) g' sigmoid(alpha g') with g' = min(g, limit) and u' =
    clamp(u, -limit, limit). `squared_relu` is relu(x)^2 with f' = f. `alpha` and `limit` mean
    nothing to the others. Raises `ValueError` for an unknown kind, integers, an odd last axis of a
    gated kind, and a weight that is not one number for each row.
    Sources: Shazeer 2020, arXiv:2002.05202; So et al. 2021, arXiv:2109.08668; OpenAI 2025,
        arXiv:2508.10925.
    """
    require(x, kind, weight)
    # fp64 stays fp64, in which parity evaluates this definition.
    inner = torch.promote_types(x.dtype, torch.float32)
    y = _activate(x.to(inner), kind, alpha, limit)
    return (y if weight is None else y * weight.to(inner)[..., None]).to(x.dtype)


def require(x: Tensor, kind: str, weight: Tensor | None) -> None:
    """Raise `ValueError` where x, kind and weight do not belong together."""
    if kind not in KINDS:
        raise ValueError(f"no activation {kind!r}; choose one of {', '.join(KINDS)}")
    for name, value in (("x", x), ("weight", weight)):
        if value is not None and not value.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {value.dtype}")
    if x.ndim == 0 or (kind in GATED and x.shape[-1] % 2):
        raise ValueError(
            f"{kind} needs gate and up as two halves of the last axis, x is {tuple(x.shape)}"
        )
    if weight is not None and weight.shape != x.shape[:-1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be one number for each row of x {tuple(x.shape)}"
        )


def _activate(x: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    if kind == "squared_relu":
        return F.relu(x).square()
    gate, up = x.chunk(2, dim=-1)
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "swiglu_clamped":
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none") * up
