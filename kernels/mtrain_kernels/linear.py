"""The product of a linear layer on a CPU, in fp32 by oneDNN.

torch gives fp32 products to MKL, which takes its wide kernels on Intel's processors alone: on others it has about
half of oneDNN's rate. Half precision goes to oneDNN anyway. What is summed, and in which precision, is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST = 1 << 24  # multiplications below which the call itself costs more than is won


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weight^T + bias` with gradients; `x` [..., k], `weight` [n, k], `bias` [n], the result [..., n]."""
    if not fits(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight)
    return y if bias is None else y + bias


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is one that oneDNN makes faster: fp32 on a CPU, of some size."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.shape[0] >= SMALLEST
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`x weight^T` without gradients: `x` [t, k], `weight` [n, k] in any strides, the result [t, n].

    `out` is memory that the result may be written to.
    """
    if not fits(x, weight):
        return torch.mm(x, weight.t(), out=out)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = product(rows, weight.t()).view(x.shape) if need_x else None
        return dx, product(rows.t(), x.flatten(0, -2).t()) if need_weight else None
