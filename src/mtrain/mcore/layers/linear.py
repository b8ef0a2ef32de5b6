"""megatron-core's linear layers, with the product that a CPU is fast at."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    layers,
)
from mtrain_kernels.fp8_linear.op import AddProduct, Recipe, Shares, fp8_linear
from mtrain_kernels.linear import add_weight_gradient, fits, linear
from mtrain_kernels.quantize.op import Operand
from torch import Tensor

from mtrain.config.engine.kernels import BY_TORCH, ON_CPU
from mtrain.mcore.layers.operands import gathered, greatest, may_gather, taken


class _Product:
    """The product of both layers: megatron-core's, a CPU's, or one in FP8."""

    fp8: Recipe | None = None
    impl = "reference"
    takes_operands = False
    """True if the producer of this layer's input may quantise for it."""
    swiglu: str | None = None
    """The implementation of this layer's own activation; its input is gate and up."""
    _operand: Operand | None = None
    _alone: bool | None = None
    """True if no other rank has a part of this layer or its tokens; None before the first call."""
    config: Any
    weight: Any
    bias: Any
    tp_group: Any
    sequence_parallel: bool
    skip_bias_add: bool
    gradient_accumulation_fusion: bool

    def forward(self, input_: Tensor, *args: Any, **more: Any) -> Any:
        """Compute megatron-core's forward; pass on the FP8 operand that comes with the input, which
        a copy of the input would lose.
        """
        if not self.takes_operands:
            return self._on_this_rank(input_, *args, **more)
        # Attributes of a module are set through a method of torch's that looks for weights.
        self.__dict__["_operand"] = taken(input_)
        try:
            return self._on_this_rank(input_, *args, **more)
        finally:
            self.__dict__["_operand"] = None

    def _on_this_rank(self, x: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Any]:
        """Compute megatron-core's forward without the parts that only several ranks need."""
        if self._alone is None:
            config = self.config
            self._alone = (
                self.tp_group.size() == 1
                and not self.sequence_parallel
                and not config.defer_embedding_wgrad_compute
                and config._cpu_offloading_context is None
            )
        if args or more or not self._alone or self.weight is None:
            return super().forward(x, *args, **more)  # type: ignore[misc,no-any-return]
        column = isinstance(self, ColumnParallelLinear)
        bias = self.bias
        inside = bias if column and not self.skip_bias_add else None
        y = self._forward_impl(
            x,
            self.weight,
            bias=inside,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
            grad_output_buffer=None,
        )
        if self.skip_bias_add:
            return y, bias
        return (y if column or bias is None else y + bias), None

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
        """Compute as megatron-core does, or by `mtrain_kernels.linear` where `cpu` is chosen.

        On a CPU there is no stream to hide a reduction behind, so nothing is lost with
        megatron-core's overlap.
        """
        if self.fp8 is not None:
            return self._in_fp8(
                input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, more
            )
        if self.impl == BY_TORCH:
            return self._by_torch(
                input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, more
            )
        fused = self.impl == ON_CPU and _adds_in_place(input, weight)
        forward_only = input.is_cpu and not torch.is_grad_enabled()
        fast = self.impl == ON_CPU and (fused or forward_only or fits(input, weight))
        # megatron-core keeps two cases that only it handles: its own fusion, and a buffer for the
        # gradient of the output.
        asked = more.get("gradient_accumulation_fusion", False) and not fused
        if asked or not fast or more.get("grad_output_buffer") is not None:
            given: dict[str, Any] = {
                "allreduce_dgrad": allreduce_dgrad,
                "sequence_parallel": sequence_parallel,
                "tp_group": tp_group,
            }
            given |= {"input": input, "weight": weight, "bias": bias, **more}
            product: Tensor = super()._forward_impl(**given)  # type: ignore[misc]
            return product
        # megatron-core's autograd function communicates by itself; a bare product needs it done
        # before.
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return linear(input, weight, bias, gradient=add_in_place if fused else None)

    def _by_torch(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: bool,
        gathers: bool,
        group: Any,
        more: dict[str, Any],
    ) -> Tensor:
        """Return the product by cuBLAS, which adds the gradient of a weight to its buffer.

        megatron-core's function overlaps products with the messages of tensor parallelism. Where
        there are none, ours costs the host a third of that.
        """
        fuses = more.get("gradient_accumulation_fusion", False) and adds_to_main_grad(weight)
        more["gradient_accumulation_fusion"] = fuses
        if sums or gathers or more.get("grad_output_buffer") is not None:
            given = {"allreduce_dgrad": sums, "sequence_parallel": gathers, "tp_group": group}
            product: Tensor = super()._forward_impl(x, weight, bias=bias, **given, **more)  # type: ignore[misc]
            return product
        fuses = fuses and weight.requires_grad
        return linear(x, weight, bias, gradient=add_in_place if fuses else None)

    def _in_fp8(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: bool,
        gathers: bool,
        group: Any,
        more: Any,
    ) -> Tensor:
        """Return the product in FP8.

        One scale for a tensor is that of the whole, of which ranks have parts.

        Of a layer split by outputs these are the weight and the gradient of the output, else weight
        and input; under context parallelism tokens, too.
        """
        if group is None:
            group = parallel_state.get_tensor_model_parallel_group()
        assert self.fp8 is not None
        operand = self._operand
        if gathers and operand is not None and may_gather(operand, self.fp8):
            x, operand = gathered(x, operand, group)
        elif gathers:
            # The scales of parts are not those of the whole, so the product quantises again.
            x = gather_from_sequence_parallel_region(x, group=group)
            operand = None
        elif sums:
            x = copy_to_tensor_model_parallel_region(x, group=group)
        column = isinstance(self, ColumnParallelLinear)
        tp = [group]
        cp = [parallel_state.get_context_parallel_group()]
        shares = Shares(
            greatest(cp if column else tp + cp), greatest(tp), greatest(tp + cp if column else cp)
        )
        into = (
            more.get("gradient_accumulation_fusion")
            and torch.is_grad_enabled()
            and adds_to_main_grad(weight)
        )
        options: dict[str, Any] = {"operand": operand, "swiglu": self.swiglu, "impl": self.impl}
        y = fp8_linear(
            x, weight, self.fp8, shares=shares, gradient=add_whole if into else None, **options
        )
        return y if bias is None else y + bias


def add_whole(weight: Tensor, add: AddProduct) -> Tensor:
    """Add the weight gradient of a product in FP8 to `weight.main_grad`; see `add_in_place`."""
    weight = parameter_of(weight)
    add(weight.main_grad)  # type: ignore[attr-defined]
    return nothing(weight)


def _adds_in_place(x: Tensor, weight: Tensor) -> bool:
    """Return whether a product can add its weight gradient to the buffer of megatron-core's data
    parallelism.

    That is an fp32 layer on a CPU under DistributedDataParallel; its FSDP gathers such buffers when
    they are read.
    """
    if not x.is_cpu or not x.dtype == weight.dtype == torch.float32 or not weight.requires_grad:
        return False
    if not hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__"):
        return False
    # A hook on the weight has to get the gradient.
    if weight._backward_hooks:
        return False
    buffer = getattr(weight, "main_grad", None)
    return (
        buffer is not None
        and buffer.dtype == weight.dtype
        and not getattr(weight, "zero_out_wgrad", False)
    )


def add_in_place(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Add the weight gradient to `weight.main_grad` at once, as megatron-core's fusion does.

    What autograd gets instead is memory that nobody reads: DistributedDataParallel's hook runs when
    it arrives, and `grad_added_to_main_grad` tells it so.
    """
    weight = parameter_of(weight)
    add_weight_gradient(weight.main_grad, dy, x)  # type: ignore[attr-defined]
    return nothing(weight)


def parameter_of(weight: Tensor) -> Tensor:
    """Return the parameter that a backward got as `weight`.

    A place to replace: with hooks on saved tensors, a backward gets one without its attributes.
    """
    return weight


def nothing(weight: Tensor) -> Tensor:
    """Return autograd's placeholder for a gradient that is in `main_grad` already.

    The weight of a tied embedding has other gradients, too: for it that is zeros.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


class _Accumulation:
    """The interface of APEX's extension: products that are added to gradients in one call."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        """Add `dy^T x` [n, k] to `main_grad` in fp32, of `x` [t, k] and `dy` [t, n]."""
        add_weight_gradient(main_grad, dy, x)

    # The product adds in the dtype of `main_grad`, by whichever name megatron-core calls it.
    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_in_products() -> None:
    """Let `mtrain_kernels` make megatron-core's `gradient_accumulation_fusion` without APEX."""
    # megatron-core looked for APEX when it was imported; this is the result.
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Accumulation
        layers._grad_accum_fusion_available = True


def adds_to_main_grad(weight: Tensor) -> bool:
    """Return whether a gradient may skip to the buffer of data parallelism, with no observer."""
    there = hasattr(weight, "grad_added_to_main_grad") and not hasattr(weight, "__fsdp_param__")
    return there and getattr(weight, "main_grad", None) is not None and not weight._backward_hooks


def add_scaled(weight: Tensor, dweight: Tensor, factor: Tensor) -> Tensor:
    """Add `dweight` times the scalar `factor` to `weight.main_grad`."""
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    if main_grad.dtype == dweight.dtype:
        main_grad.addcmul_(dweight, factor.to(dweight.dtype))
    else:
        main_grad.add_((dweight * factor).to(main_grad.dtype))
    return nothing(weight)


class ColumnLinear(_Product, ColumnParallelLinear):
    """A linear layer split by output features."""


class RowLinear(_Product, RowParallelLinear):
    """A linear layer split by input features."""
