"""megatron-core's linear layers, with the product that a CPU is fast at."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from mtrain_kernels.linear import add_weight_gradient, fits, linear, product
from torch import Tensor


class _Product:
    """`_forward_impl` of both: what megatron-core does, or the same by `mtrain_kernels.linear` where that is faster.

    On a CPU there is no stream to hide a reduction behind, so nothing is lost with megatron-core's overlap.
    """

    def _forward_impl(
        self,
        input: Tensor,  # the names are megatron-core's
        weight: Tensor,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **more: Any,
    ) -> Tensor:
        fused = _adds_in_place(input, weight)
        if not (fused or fits(input, weight)) or more.get("grad_output_buffer") is not None:
            given = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
            return super()._forward_impl(input=input, weight=weight, bias=bias, **given, **more)  # type: ignore[misc,no-any-return]
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        if not fused:
            return linear(input, weight, bias)
        y: Tensor = _Accumulating.apply(input, weight)
        return y if bias is None else y + bias


def _adds_in_place(x: Tensor, weight: Tensor) -> bool:
    """Whether a product can add its weight gradient to the buffer of megatron-core's data parallelism.

    That is an fp32 layer on a CPU under DistributedDataParallel; its FSDP gathers such buffers when they are read.
    """
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32 or not weight.requires_grad:
        return False
    if not hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__"):
        return False
    if weight._backward_hooks:  # somebody wants to see the gradient
        return False
    buffer = getattr(weight, "main_grad", None)
    return buffer is not None and buffer.dtype == weight.dtype and not getattr(weight, "zero_out_wgrad", False)


class _Accumulating(torch.autograd.Function):
    """A product whose weight gradient is added to `weight.main_grad` at once, as megatron-core's fusion does.

    The gradient that autograd gets for the weight is memory that nobody reads: DistributedDataParallel's hook runs
    when it arrives, and `grad_added_to_main_grad` tells it so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dx = product(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None
        add_weight_gradient(weight.main_grad, rows, x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return dx, torch.empty_like(weight)


class ColumnLinear(_Product, ColumnParallelLinear):
    """A linear layer split by output features."""


class RowLinear(_Product, RowParallelLinear):
    """A linear layer split by input features."""
