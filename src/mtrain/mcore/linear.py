"""megatron-core's linear layers, with the product that a CPU is fast at."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from mtrain_kernels.linear import fits, linear
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
        if not fits(input, weight) or more.get("grad_output_buffer") is not None:
            given = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
            return super()._forward_impl(input=input, weight=weight, bias=bias, **given, **more)  # type: ignore[misc,no-any-return]
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear(input, weight, bias)


class ColumnLinear(_Product, ColumnParallelLinear):
    """A linear layer split by output features."""


class RowLinear(_Product, RowParallelLinear):
    """A linear layer split by input features."""
