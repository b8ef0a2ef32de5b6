"""Rotation on a CPU: of whole heads in fp32 without concatenations, else the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.rope import reference


def fits(x: Tensor, cos: Tensor) -> bool:
    """Return whether whole heads `x` [..., s, n, d] are turned by tables [s, d / 2] in fp32."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and 2 * cos.shape[-1] == x.shape[-1]


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Tensor:
    """Turn `x` as `reference.rotate` does."""
    plain = positions is None and weight is None and not interleaved
    # a compiler fuses the definition, and its gradient, better than this fixed sequence
    if not plain or not fits(x, cos) or torch.compiler.is_compiling():
        more: dict[str, Any] = {"weight": weight, "eps": eps, "zero_centered": zero_centered}
        return reference.rotate(x, cos, sin, positions=positions, interleaved=interleaved, **more)
    c, s = (t.float()[: x.shape[-3], None] for t in (cos, sin))
    y: Tensor = _Rotate.apply(x, torch.cat((c, c), -1), s)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation turns the other way.
        return _turned(dy, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out
