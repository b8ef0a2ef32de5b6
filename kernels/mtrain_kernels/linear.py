"""The product of a linear layer on a CPU in fp32: by the BLAS that torch was built with, or by
oneDNN.

torch gives fp32 products to its BLAS, mostly MKL, which takes its wide kernels only on some makers'
processors: on others oneDNN has twice its rate. Which one is faster is measured where it
runs; see `faster`. Half precision goes to oneDNN anyway. What is summed, and in which precision, is
the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtrain_kernels.operators import apply_of

Library = Literal["blas", "onednn"]
WeightGradient = Callable[[Tensor, Tensor, Tensor], Tensor]
SMALLEST = 1 << 24  # multiplications below which a call of oneDNN costs more than is won
# the same for a row or a few without gradients, whose time is that of reading the weight
SMALLEST_WEIGHT = 1 << 17
# how much faster oneDNN must be measured to be taken: noise does not change the choice
MARGIN = 1.1
# tokens, inputs and outputs of layers to measure
SHAPES = (
    (512, 384, 1152),
    (512, 1024, 384),
    (256, 512, 2048),
)

_library: Library = "blas"


def use(library: Library) -> None:
    """Make the fp32 products of this process by `library`.

    Raises `ValueError` where it is not here.
    """
    global _library
    if library not in ("blas", "onednn"):
        raise ValueError(f"{library!r} is neither blas nor onednn")
    if library == "onednn" and not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN")
    _library = library


def faster(rounds: int = 5) -> tuple[Library, float]:
    """Return the library to take here, and the rate of oneDNN over that of the BLAS; about 0.1 s of
    a core.

    It is measured on the three products of some layers, forward and backward: the least CPU seconds
    of some rounds, the two in turn, so that other processes disturb little.
    """
    if not torch.backends.mkldnn.is_available():
        return "blas", 0.0
    before = _library
    least = {"blas": 0.0, "onednn": 0.0}
    try:
        for tokens, inputs, outputs in SHAPES:
            x, weight, dy = (
                torch.ones(s) for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
            )
            gradient = torch.zeros(outputs, inputs)
            seconds = {"blas": [0.0] * 0, "onednn": [0.0] * 0}
            # One round more, since the first warms caches and is left out.
            for _ in range(rounds + 1):
                for library in ("blas", "onednn"):
                    use(library)
                    begin = time.process_time()
                    product(x, weight)
                    product(dy, weight.t())
                    add_weight_gradient(gradient, dy, x)
                    seconds[library].append(time.process_time() - begin)
            for library, values in seconds.items():
                least[library] += min(values[1:])
    finally:
        use(before)
    ratio = least["blas"] / max(least["onednn"], 1e-9)
    return ("onednn" if ratio >= MARGIN else "blas"), ratio


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gradient: WeightGradient | None = None
) -> Tensor:
    """Compute `x weight^T + bias` with gradients; `x` [..., k], `weight` [n, k], `bias` [n], the
    result [..., n].

    `gradient(weight, dy, x)` of `dy` [t, n] and `x` [t, k] makes autograd's gradient of the weight;
    None: `weight_gradient`.
    """
    if gradient is None and not fits(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        apply = _Linear.apply if torch.compiler.is_compiling() else _apply
        y: Tensor = apply(x, weight, gradient)
    else:
        y = product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is made by oneDNN: fp32 on a CPU, of some size, where
    `use` said so.
    """
    return (
        _library == "onednn"
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and (
            x.numel() * weight.shape[0] >= SMALLEST
            or (weight.numel() >= SMALLEST_WEIGHT and not torch.is_grad_enabled())
        )
        and not torch.compiler.is_compiling()
    )


def product(x: Tensor, weight: Tensor, out: Tensor | None = None, *, plain: bool = False) -> Tensor:
    """Return `x weight^T` without gradients: `x` [t, k], `weight` [n, k], the result [t, n].

    `out` is memory that the result may be written to. `plain`: by torch's BLAS, whatever `use` set.
    """
    if plain or not fits(x, weight):
        return torch.mm(x, weight.t(), out=out)
    # The operator that torch's compiler emits: it takes ordinary tensors instead of oneDNN's own.
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return `dy^T x` [n, k] of `dy` [t, n] and `x` [t, k]."""
    return product(dy.t(), x.t())


def add_weight_gradient(into: Tensor, dy: Tensor, x: Tensor, *, plain: bool = False) -> None:
    """Add `dy^T x` to `into` [n, k], in one call where the BLAS makes it: `dy` [t, n] and `x` [t,
    k].

    `into` in fp32 gets the products of half precision unrounded: cuBLAS adds to it as it
    multiplies, a CPU widens.

    oneDNN copies its first operand where that is transposed. Into a transposed `into` (see
    `zero_gradient`) it is `x` that is copied, not `dy`.
    """
    if into.dtype != x.dtype and into.is_cuda and into.dtype == torch.float32:
        torch.addmm(into, dy.t(), x, out_dtype=torch.float32, out=into)
    elif into.dtype != x.dtype:
        into.addmm_(dy.t().to(into.dtype), x.to(into.dtype))
    elif plain or not fits(dy.t(), x.t()):
        into.addmm_(dy.t(), x)
    elif into.stride(0) == 1 != into.stride(1):
        into.t().add_(product(x.t(), dy.t()))
    else:
        into.add_(weight_gradient(dy, x))


def zero_gradient(
    weight: Tensor, dtype: torch.dtype, tokens: int, *, plain: bool = False
) -> Tensor:
    """Return zeros in the shape of `weight` [n, k], laid out for `add_weight_gradient`.

    With n > k rows, oneDNN copies less of `tokens` inputs if the gradient is transposed.
    """
    n, k = weight.shape
    rows = weight.new_empty((1, 1)).expand(tokens, k)
    if n > k and dtype == weight.dtype and not plain and fits(rows, weight):
        return weight.new_zeros((k, n), dtype=dtype).t()
    return weight.new_zeros((n, k), dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: WeightGradient | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient = gradient
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        inputs = x.flatten(0, -2)
        dx = product(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        return (
            dx,
            ctx.gradient(weight, rows, inputs) if ctx.gradient else weight_gradient(rows, inputs),
            None,
        )


_apply = apply_of(_Linear)
