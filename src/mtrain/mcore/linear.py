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
from mtrain_kernels.linear import add_weight_gradient, fits, linear
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
        forward_only = input.is_cpu and not torch.is_grad_enabled()
        if not (fused or forward_only or fits(input, weight)) or more.get("grad_output_buffer") is not None:
            given = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
            return super()._forward_impl(input=input, weight=weight, bias=bias, **given, **more)  # type: ignore[misc,no-any-return]
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear(input, weight, bias, gradient=_add_in_place if fused else None)


def _adds_in_place(x: Tensor, weight: Tensor) -> bool:
    """Whether a product can add its weight gradient to the buffer of megatron-core's data parallelism.

    That is an fp32 layer on a CPU under DistributedDataParallel; its FSDP gathers such buffers when they are read.
    """
    if not x.is_cpu or not x.dtype == weight.dtype == torch.float32 or not weight.requires_grad:
        return False
    if not hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__"):
        return False
    if weight._backward_hooks:  # somebody wants to see the gradient
        return False
    buffer = getattr(weight, "main_grad", None)
    return buffer is not None and buffer.dtype == weight.dtype and not getattr(weight, "zero_out_wgrad", False)


def _add_in_place(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Adds the weight gradient to `weight.main_grad` at once, as megatron-core's fusion does.

    What autograd gets instead is memory that nobody reads: DistributedDataParallel's hook runs when it arrives, and
    `grad_added_to_main_grad` tells it so.
    """
    add_weight_gradient(weight.main_grad, dy, x)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


class ColumnLinear(_Product, ColumnParallelLinear):
    """A linear layer split by output features."""


class RowLinear(_Product, RowParallelLinear):
    """A linear layer split by input features."""
