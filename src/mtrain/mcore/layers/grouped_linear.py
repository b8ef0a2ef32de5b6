"""Linear layers of experts: one call for a rank's experts, reading each weight in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from mtrain_kernels.fp8_grouped.op import grouped_fp8
from mtrain_kernels.fp8_linear.op import Recipe
from mtrain_kernels.grouped_gemm.op import PLAIN, grouped_gated, grouped_gemm, rows_of
from torch import Tensor, nn

Init = Callable[[Tensor], Any]


class Gate(NamedTuple):
    """An activation that is made in the kernels of a product, each row [r] times its `share`."""

    kind: str
    """Kind of the activation after a product; before an FP8 product, SwiGLU's implementation."""
    share: Tensor | None
    again: bool = False
    """True if the backward recomputes the activation from its saved inputs."""


class _GroupedLinear(nn.Module):
    """This rank's experts' layers of one kind, applied to the rows that were sent to each.

    Named and called as TransformerEngine's grouped layers, so that megatron-core's `TEGroupedMLP`
    takes either, with checkpoints that `SequentialMLP` reads. The token dispatcher does all
    communication, over expert-tensor ranks too.
    """

    partition_dim: int
    impl = "reference"
    fp8: Recipe | None = None
    """FP8 recipe of the products, or None; each expert has scales of its own rows and weight."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Init,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self._tp = self._groups.expt_tp
        ranks = self._tp.size()
        if bias and self.partition_dim == 1 and ranks > 1:
            raise ValueError(
                "a bias after a row-parallel expert layer would be added once per rank"
            )
        self._config = config
        self._init_method = init_method
        self._whole = (output_size, input_size)
        shape = list(self._whole)
        shape[self.partition_dim] = divide(shape[self.partition_dim], ranks)
        self.num_gemms = num_gemms
        self._returns_bias = bias and skip_bias_add
        self._adds_bias = bias and not skip_bias_add
        for i in range(num_gemms):
            self.register_parameter(
                f"weight{i}", nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            )
            if bias:
                parameter = nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                # Marked as split: ranks that sum the gradient norm of experts never hold the same
                # bias, whatever their tensor-parallel rank.
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
                self.register_parameter(f"bias{i}", parameter)
        if not self.weight0.is_meta:
            self.reset_parameters()
        # megatron-core reduces gradients over expert-data-parallel ranks where `allreduce` is
        # False. Experts that are sharded like dense weights are reduced with those.
        as_dense = (
            config.expert_model_parallel_size == 1 and ranks == config.tensor_model_parallel_size
        )
        for parameter in self.parameters():
            parameter.allreduce = as_dense  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Draw the weights as megatron-core's layers do: on a CPU, from the whole weight."""
        config = self._config
        for weight in self._each("weight"):
            if not config.perform_initialization:
                continue
            if config.use_cpu_initialization:
                _initialize_affine_weight_cpu(
                    weight,
                    *self._whole,
                    weight.shape[self.partition_dim],
                    self.partition_dim,
                    self._init_method,
                    params_dtype=config.params_dtype,
                    rank=self._tp.rank(),
                    world_size=self._tp.size(),
                )
            else:
                _initialize_affine_weight_gpu(
                    weight, self._init_method, self.partition_dim, is_expert=True
                )

    def forward(
        self,
        x: Tensor,
        rows: Sequence[int] | Tensor,
        *,
        behind: Gate | None = None,
        before: Gate | None = None,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Map `x` [r, input] to [r, output]; return the biases too, if the caller adds them.

        `rows` says how many each expert has, on the host or in integers on the device, where they
        stay; with the latter, rows behind the last expert's give zeros. An activation is made in
        the same kernels: `behind` the product, [r, output / 2], where `may_gate`; `before` it, of x
        [r, 2 input] and on the way into FP8. It is an argument, so that hooks of this module run:
        megatron-core's waits for weights that are being gathered.
        """
        if behind is not None:
            return self._gated(x, torch.as_tensor(rows, device=x.device), behind), None
        biases = self._each("bias") if self._adds_bias else None
        if self.fp8 is not None:
            if before is None:
                gate = {}
            else:
                gate = {"swiglu": before.kind, "share": before.share, "again": before.again}
            y = self._in_fp8(x, torch.as_tensor(rows, device=x.device), **gate)
        elif self.impl in PLAIN and not isinstance(rows, Tensor):
            # Plain torch splits the rows on the host, so it needs the counts there.
            y = PLAIN[self.impl].grouped_linear(x, self._each("weight"), rows, biases)
        else:
            counts = torch.as_tensor(rows, device=x.device)
            stacked = None if biases is None else torch.stack(biases)
            more: dict[str, Any] = {"impl": self.impl, "main_grads": self._main_grads()}
            y = grouped_gemm(x, self._each("weight"), counts, stacked, **more)
        return y, self._each("bias") if self._returns_bias else None

    def _in_fp8(self, x: Tensor, counts: Tensor, **activation: Any) -> Tensor:
        assert self.fp8 is not None
        more: dict[str, Any] = {"impl": self.impl, "main_grads": self._main_grads(), **activation}
        y = grouped_fp8(x, self._each("weight"), counts, self.fp8, **more)
        if self._adds_bias:
            y = y + rows_of(torch.stack(self._each("bias")), counts, y.shape[0], impl=self.impl)
        return y

    @property
    def may_gate(self) -> bool:
        """Return whether a product may make the activation: its kernel knows no bias and no FP8."""
        return (
            self.fp8 is None
            and self.impl == "triton"
            and not self._adds_bias
            and not self._returns_bias
        )

    def _gated(self, x: Tensor, counts: Tensor, gate: Gate) -> Tensor:
        more: dict[str, Any] = {"impl": self.impl, "main_grads": self._main_grads()}
        return grouped_gated(x, self._each("weight"), counts, gate.kind, gate.share, **more)

    def _main_grads(self) -> Callable[[], list[Tensor]] | None:
        """Return the buffers of megatron-core's data parallelism, where the kernel can add weight
        gradients to them at once.

        megatron-core's FSDP gathers such buffers when they are read, and a hook wants to see the
        gradient. A replayed graph of a layer says only with `gradient_accumulation_fusion` that
        nothing is left to add.
        """
        weights = self._each("weight")
        config = self._config
        captured = config.cuda_graph_impl != "none"
        if (
            self.impl != "triton"
            or (captured and not config.gradient_accumulation_fusion)
            or not torch.is_grad_enabled()
            or not all(map(_has_buffer, weights))
        ):
            return None

        def buffers() -> list[Tensor]:
            # Called in the backward, just before the kernel adds: the mark tells DDP's hook that
            # nothing is left to add.
            for weight in weights:
                weight.grad_added_to_main_grad = True
            return [weight.main_grad for weight in weights]

        return buffers

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are made in the backward pass."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return each expert's tensors at its place among all, under `SequentialMLP`'s keys."""
        axes = {"weight": self.partition_dim} | ({"bias": 0} if self.partition_dim == 0 else {})
        return self.sharded_by_expert(
            ("weight", "bias"), axes, prefix, sharded_offsets, metadata or {}
        )

    def sharded_by_expert(
        self,
        names: Sequence[str],
        axes: dict[str, int],
        prefix: str,
        sharded_offsets: tuple[Any, ...],
        metadata: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the shards of the tensors with these names and an expert's number; `axes` are
        split over expert-tensor ranks.
        """
        alone = metadata.get("singleton_local_shards", False)
        first = self._groups.ep.rank() * self.num_gemms
        result: dict[str, Any] = {}
        for i in range(self.num_gemms):
            sharded = make_sharded_tensors_for_checkpoint(
                {n: getattr(self, f"{n}{i}") for n in names if hasattr(self, f"{n}{i}")},
                f"{first + i}.{prefix}" if alone else prefix,
                axes,
                sharded_offsets if alone else self.offsets_of_expert(i, sharded_offsets),
                tp_group=self._tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for key, tensor in sharded.items():
                # megatron-core numbered the replicas of dense weights; those of an expert are the
                # ranks of its own data-parallel group.
                tensor.replica_id = (*tensor.replica_id[:2], self._groups.expt_dp.rank())
                result[f"{prefix}{key.rsplit('.', 1)[-1]}{i}"] = tensor
        return result

    def offsets_of_expert(self, i: int, sharded_offsets: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the place of this rank's expert `i` among all, after the offsets of layers."""
        first = self._groups.ep.rank() * self.num_gemms
        experts = self._groups.ep.size() * self.num_gemms
        return (*sharded_offsets, (len(sharded_offsets), first + i, experts))

    def _each(self, name: str) -> list[Any]:
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]


class ColumnGroupedLinear(_GroupedLinear):
    """Experts' first layers: each expert-tensor rank holds part of the output features."""

    partition_dim = 0


class RowGroupedLinear(_GroupedLinear):
    """Experts' second layers: each expert-tensor rank holds part of the input features."""

    partition_dim = 1


def _has_buffer(weight: Any) -> bool:
    if (
        not weight.requires_grad
        or not hasattr(weight, "grad_added_to_main_grad")
        or weight._backward_hooks
    ):
        return False
    apart = hasattr(weight, "__fsdp_param__") or getattr(weight, "zero_out_wgrad", False)
    return not apart and getattr(weight, "main_grad", None) is not None
