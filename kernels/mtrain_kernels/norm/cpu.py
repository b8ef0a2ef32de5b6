"""RMSNorm on a CPU: the definition with its gradient written out, in fewer passes over memory than
autograd's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether a norm of `x` is what this is made for."""
    on_cpu = x.device.type == weight.device.type == "cpu" and x.shape[-1] > 0
    return on_cpu and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """`reference.rms_norm`: `x` [..., h], `weight` [h], fp32 inside."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.float()
        scale = weight.float() + 1 if zero_centered else weight.float()
        squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        ctx.weight_dtype = weight.dtype
        return (rows * inverse).mul_(scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, scale, inverse = ctx.saved_tensors
        width = x.shape[-1]
        inverse = inverse.reshape(-1, 1)
        normed = x.reshape(-1, width).float() * inverse
        dy = dy.reshape(-1, width).float()
        product = dy * normed
        dweight = product.sum(0).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None, None
        share = torch.mv(product, scale).div_(-width)
        dx = torch.mul(dy, scale, out=product).addcmul_(normed, share[:, None]).mul_(inverse)
        return dx.view(x.shape).to(x.dtype), dweight, None, None
