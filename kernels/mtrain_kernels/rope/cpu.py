"""Rotation of halves in fp32 on a CPU: the definition with its gradient written out, without
concatenations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fits(x: Tensor, cos: Tensor) -> bool:
    """Return whether a rotation of whole heads `x` [..., s, n, d] by tables [s, d / 2] is what this
    is made for.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32 and 2 * cos.shape[-1] == x.shape[-1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rotate` of `x` [..., s, n, d] by `cos` and `sin` [p, d / 2], p >= s: no weight,
    not interleaved.
    """
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
        return _turned(dy, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out
