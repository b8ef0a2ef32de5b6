"""Norms on a CPU: RMSNorm with its gradient written out, in fewer passes than autograd's.

torch's LayerNorm is one kernel on a CPU, so the other norms are the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_kernels.norm import reference
from mtrain_kernels.norm.reference import layer_norm as layer_norm
from mtrain_kernels.norm.reference import layer_norm_residual as layer_norm_residual
from mtrain_kernels.norm.reference import rms_norm_residual as rms_norm_residual


def obstacle(x: Tensor) -> str | None:
    """Return why norms of `x` are left to the definition, or None."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{x.dtype} is not fp32, fp16 or bf16, and sums here are fp32"
    return None if x.shape[-1] else "rows have no elements"


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Compute `reference.rms_norm`: `x` [..., h], `weight` [h], fp32 inside."""
    # a compiler fuses the definition, and its gradient, better than this fixed sequence
    if torch.compiler.is_compiling():
        return reference.rms_norm(x, weight, eps, zero_centered=zero_centered)
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = x.float()
        scale = weight.float() + 1 if zero_centered else weight.float()
        # A reduction without a tensor of squares; squaring its result costs one number for each
        # row.
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
        # Into memory that is no longer needed.
        dx = torch.mul(dy, scale, out=product).addcmul_(normed, share[:, None]).mul_(inverse)
        return dx.view(x.shape).to(x.dtype), dweight, None, None
