"""Patches of fully sharded data parallelism: megatron-core's FSDP and torch's FSDP2."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from mtrain.config.engine.release import UNTIL_0_16
from mtrain.mcore.patches.patch import NO_TE, core, patch


@patch(
    "norm-groups",
    "utils.py:1074",
    "Asks the mesh of a gradient for its one group: RuntimeError where it has two dimensions"
    " (FSDP2's replicas). And takes two groups of the same ranks (dense, expert) for different"
    " ones: AssertionError.",
    "everywhere",
)
def norm_groups() -> None:
    """Ask the mesh for the ranks of its last dimension, and compare ranks."""
    from torch.distributed.tensor import DTensor

    def group_of(tensor: torch.Tensor, known: Any = None) -> Any:
        if not isinstance(tensor, DTensor):
            return None
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        ranks = torch.distributed.get_process_group_ranks
        assert known is None or ranks(known) == ranks(group), (
            "gradients of one norm are sharded over different ranks"
        )
        return group

    core("optimizer.clip_grads").get_data_parallel_group_if_dtensor = group_of


@patch(
    "fsdp-te-linear",
    "distributed/fsdp/mcore_fsdp_adapter.py:184",
    "Without TransformerEngine TELinear is a MagicMock: isinstance raises TypeError under"
    " tensor parallelism.",
    NO_TE,
    UNTIL_0_16,
    "#3191",
)
def fsdp_te_linear() -> None:
    """Say that no layer is TransformerEngine's."""
    # isinstance(x, ()) is False for every x.
    core("distributed.fsdp.mcore_fsdp_adapter").TELinear = ()


@patch(
    "fsdp-optim-replicas",
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:2906",
    "With only optimizer state sharded (optim), gradients are reduced within a replica and"
    " never between them: each silently trains on samples of its own.",
    "everywhere",
)
def fsdp_optim_replicas() -> None:
    """Sum a replica's gradients with those of the others."""
    cls = core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer").ParamAndGradBuffer
    original = cls.reduce_scatter_gradients

    @functools.wraps(original)
    def reduce_scatter_gradients(self: Any, async_op: bool = True) -> None:
        original(self, async_op)
        if self.dist_index.use_hybrid_fsdp:
            for group in self.parameter_groups:
                if group.main_grad_buffer is not None:
                    # A replica's gradients are reduced by now, so shards at the same place are
                    # summed over replicas.
                    own = group.main_grad_buffer.get_shard_from_local_buffer()
                    torch.distributed.all_reduce(own, group=self.dist_index.get_outer_fsdp_group())

    cls.reduce_scatter_gradients = reduce_scatter_gradients


@patch(
    "fsdp-lone-rank",
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3263",
    "In a group of one rank (ep = dp) the reduced gradient is added to itself: silently"
    " doubled, and those of earlier micro-batches again at each later one.",
    "everywhere",
    UNTIL_0_16,
)
def fsdp_lone_rank() -> None:
    """Leave a gradient that no other rank shares as it is."""
    cls = core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer").GradReducePipeline
    original = cls._bucket_group_gradient_reduce

    @functools.wraps(original)
    def reduce(self: Any, bucket_group: list[int], async_op: bool = False, **kw: Any) -> bool:
        buffers = [self.get_fsdp_buffer(bucket) for bucket in bucket_group]
        if any(buffer.data_parallel_group.size() > 1 for buffer in buffers):
            return bool(original(self, bucket_group, async_op, **kw))
        for bucket, buffer in zip(bucket_group, buffers, strict=True):
            if buffer.gradient_scaling_factor is not None:
                buffer.data.mul_(buffer.gradient_scaling_factor)
            if kw.get("outer_fsdp_group_grad_reduce"):
                torch.distributed.all_reduce(
                    buffer.data, group=self.buffer.dist_index.get_outer_fsdp_group()
                )
            # As the original does at its end: the next micro-batch begins to count anew.
            self.bucket_grad_ready_params[bucket] = set()
        return True

    cls._bucket_group_gradient_reduce = reduce


@patch(
    "fsdp-division",
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3771",
    "By default gradients are divided within NCCL's sum, which gloo does not know: RuntimeError.",
    "off CUDA",
)
def fsdp_division() -> None:
    """Divide before the sum."""
    module = core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")
    original = module.gradient_reduce_preprocessing

    @functools.wraps(original)
    def preprocess(gradient: torch.Tensor, factor: float | None, ddp_config: Any) -> Any:
        apart = dataclasses.replace(ddp_config, gradient_reduce_div_fusion=False)
        return original(gradient, factor, apart)

    module.gradient_reduce_preprocessing = preprocess


@patch(
    "fsdp-meshes",
    "distributed/fsdp/mcore_fsdp_adapter.py:369",
    "Takes the data- and tensor-parallel ranks for the whole world: EinopsError with pipeline"
    " stages.",
    "everywhere",
)
def fsdp_meshes() -> None:
    """Derive a mesh from the groups that this rank is in, whatever else there is in the world."""
    module = core("distributed.fsdp.mcore_fsdp_adapter")

    def mesh(*groups: Any) -> torch.Tensor:
        here = torch.distributed.get_rank()
        found = torch.tensor([0])
        for group in groups:
            # Distances from this rank along each dimension add up to the ranks of the mesh.
            steps = torch.tensor(torch.distributed.get_process_group_ranks(group)) - here
            found = found[..., None] + steps
        return found[0] + here

    module._get_dp_tp_mesh = lambda dp, tp, ep_size=1: mesh(dp, tp)
    module._get_hsdp_tp_mesh = mesh


@patch(
    "fsdp-checks",
    "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:4128",
    "Compares each sharded weight over the whole world: stages with unequal numbers of them"
    " fail or hang.",
    "everywhere",
)
def fsdp_checks() -> None:
    """Validate the shards of a weight within its group; other stages do not matter."""
    module = core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")
    original = module.make_fsdp_dtensor

    @functools.wraps(original)
    def make_fsdp_dtensor(*args: Any, run_check: bool = False, **kwargs: Any) -> Any:
        made = original(*args, run_check=False, **kwargs)
        if run_check:
            module.validate_uneven_dtensor(made)
        return made

    module.make_fsdp_dtensor = make_fsdp_dtensor


@patch(
    "fsdp-tied-stages",
    "distributed/finalize_model_grads.py:259",
    "With megatron-core's FSDP the gradient of an embedding that two stages hold is set to this"
    " rank's part of it: RuntimeError about its size. The sum in place is all that is needed.",
    "everywhere",
)
def fsdp_tied_stages() -> None:
    """Sum this rank's parts of the gradient in place."""
    module = core("distributed.finalize_model_grads")
    original = module._allreduce_embedding_grad
    unwrap = module.get_attr_wrapped_model

    @functools.wraps(original)
    def reduce(
        model: list[Any], embd_group: Any, pp_group: Any, weight_getter: Any, *args: Any, **kw: Any
    ) -> None:
        if not model[0].ddp_config.use_megatron_fsdp:
            original(model, embd_group, pp_group, weight_getter, *args, **kw)
        elif embd_group is not None and embd_group.size() > 1:
            weights = [
                weight_getter(unwrap(chunk, "pre_process", return_model_obj=True))
                for chunk in model
            ]
            for weight in weights:
                if weight is not None and weight.grad is not None:
                    torch.distributed.all_reduce(weight.grad._local_tensor, group=embd_group)

    module._allreduce_embedding_grad = reduce


@patch(
    "fsdp-unscaling",
    "optimizer/distrib_optimizer.py:2312",
    "Unscales fp16's gradient of every weight, also where a rank owns no part of it:"
    " AttributeError of None.",
    "everywhere",
)
def fsdp_unscaling() -> None:
    """Unscale the gradients that there are."""
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls._collect_main_grad_data_for_unscaling

    @functools.wraps(original)
    def gradients(self: Any) -> list[torch.Tensor]:
        if not self.ddp_config.use_megatron_fsdp:
            return list(original(self))
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.grad._local_tensor for p in params if p.grad is not None]

    cls._collect_main_grad_data_for_unscaling = gradients
