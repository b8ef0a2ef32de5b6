"""Fully sharded data parallelism: torch's FSDP2 in megatron-core's wrapper, or its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mtrain.config.engine import release
from mtrain.mcore import api as mcore

LAYERS = (mcore.TransformerLayer, mcore.MambaLayer)
"""Modules whose weights are gathered together, and freed after use."""


class FullySharded(mcore.TorchFullyShardedDataParallel):
    """A chunk whose weights, gradients and optimizer state are sharded over data-parallel ranks,
    layer by layer.

    megatron-core's own constructor is not run, because it can do none of these:

    - With the loss per token, gradients are summed over the ranks and divided by the tokens of the
      global batch. FSDP2 takes the mean over the ranks by itself: without a divide factor of 1
      every gradient is dp * cp times too small (a norm of half with dp 2). And `scale_gradients`
      was empty: nothing divided by the tokens.
    - Gradients are reduced and added up over micro-batches in fp32 where the run asks for that;
      FSDP2 adds them up in the dtype of the weights. A weight's `main_grad` is its gradient
      from the start, and may be wider than the weight: FSDP2 adds to it, and no hook runs next to
      it.
    - While one layer computes, the next one is gathered, in the forward and the backward. Where
      whole layers are run again in the backward, only the backward does so: their second forward
      would gather weights that have been used already.
    - Replicas (HSDP) are a mesh of two dimensions, and experts that other ranks hold have a mesh of
      their own.
    - A tied embedding is not freed before the output layer has used it.
    - Weights may still be without memory (on torch's meta device); they get it once they are
      sharded, so a rank never holds more than its own part.
    """

    def __init__(
        self, config: Any, ddp_config: Any, module: torch.nn.Module, device: torch.device
    ) -> None:
        super(mcore.TorchFullyShardedDataParallel, self).__init__(config=config, module=module)
        self.ddp_config = ddp_config
        # `fully_shard` replaces the parameters, and megatron-core's marks on them are lost.
        attributes = {name: dict(vars(p)) for name, p in module.named_parameters()}
        self._shard(config, device)
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for name, param in module.named_parameters():
            for attribute, value in attributes[name].items():
                setattr(param, attribute, value)
            dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else param.dtype
            zeros = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            param.main_grad = zeros  # type: ignore[attr-defined]
            if param.requires_grad:
                # torch rejects a gradient in another dtype than the weight's without this.
                param.grad_dtype = dtype  # type: ignore[attr-defined]

    def _shard(self, config: Any, device: torch.device) -> None:
        reduce_dtype = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        meshes = {experts: _mesh(device, experts=experts) for experts in (False, True)}
        previous = None
        for unit, experts in (*_units(self.module), (self.module, False)):
            sharded = fully_shard(
                unit, mesh=meshes[experts], mp_policy=policy, reshard_after_forward=True
            )
            sharded.set_gradient_divide_factor(1.0)
            # Otherwise a divide factor makes FSDP2 multiply inside of the reduction, which only
            # NCCL can.
            sharded.set_force_sum_reduction_for_comms(True)
            if unit is not self.module and not experts:
                # torch prefetches in the reverse order of the last forwards, which a layer that
                # runs again in the backward changes.
                sharded.set_modules_to_backward_prefetch([previous] if previous else [])
                if previous and config.recompute_granularity != "full":
                    previous.set_modules_to_forward_prefetch([sharded])
                previous = sharded

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model after returning gradients to the weights; optimizers take them."""
        if torch.is_grad_enabled():
            for param in self.module.parameters():
                if param.requires_grad and param.grad is not param.main_grad:
                    param.grad = param.main_grad
        return super().forward(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero."""
        for param in self.module.parameters():
            param.main_grad.zero_()

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply all gradients."""
        for param in self.module.parameters():
            param.main_grad.mul_(scaling_factor)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing: FSDP2 has reduced the gradients when the backward pass ends."""


def _units(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, bool]]:
    """List the modules that are gathered and freed at once, inner ones first, and whether each
    holds experts that are sharded over other ranks.
    """
    tied = any(getattr(m, "share_embeddings_and_output_weights", False) for m in model.modules())
    for module in model.modules():
        if isinstance(module, LAYERS):
            experts = getattr(getattr(module, "mlp", None), "experts", None)
            if experts is not None and not all(
                getattr(p, "allreduce", True) for p in experts.parameters()
            ):
                yield experts, True
            yield module, False
        elif isinstance(module, mcore.LanguageModelEmbedding) and not tied:
            yield module, False


def _mesh(device: torch.device, *, experts: bool) -> DeviceMesh:
    """Return the ranks that share the weights; of more than one replica, (replica, part)."""
    ps = mcore.parallel_state
    if experts:
        whole = ps.get_expert_data_parallel_group()
        part = ps.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    else:
        whole = ps.get_data_parallel_group(with_context_parallel=True)
        part = ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if part.size() == whole.size():
        return DeviceMesh.from_group(whole, device.type)
    ranks = torch.tensor(dist.get_process_group_ranks(whole)).view(-1, part.size())
    between = ps.get_inter_distributed_optimizer_instance_group()
    return DeviceMesh.from_group(
        [between, part], device.type, mesh=ranks, mesh_dim_names=("replica", "part")
    )


class FullyShardedBuffers(mcore.MegatronFSDP):
    """A chunk whose optimizer state, gradients and weights (or the first of these) are parts of
    flat buffers.

    Parameters without memory (on torch's meta device) get it when their group is sharded, a layer
    at a time, so a rank holds its own part and one layer at most.
    """

    def __init__(
        self, config: Any, ddp_config: Any, module: torch.nn.Module, device: torch.device
    ) -> None:
        deferred = [
            m for m in module.modules() if any(p.is_meta for p in m.parameters(recurse=False))
        ]
        for owner in deferred:
            before = {
                **dict(owner.named_parameters(recurse=False)),
                **dict(owner.named_buffers(recurse=False)),
            }
            constants = {name: t.detach().clone() for name, t in before.items() if not t.is_meta}
            for name in constants.keys() & owner._parameters.keys():
                _forget(owner._parameters[name])
            # megatron-core calls this once it has given a module memory, whose new parameters have
            # no marks and no constants.
            restore: Any = partial(_restore, owner, before, constants)
            owner.reset_parameters = restore
        config.init_model_with_meta_device = bool(deferred)
        every = ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
        super().__init__(config, ddp_config, module, list(LAYERS) if every else None, device=device)
        for owner in deferred:
            del owner.reset_parameters
        if ddp_config.data_parallel_sharding_strategy == "optim_grads_params":
            # The forward gathers its weights; weights gathered at the end of a step would stay in
            # memory until then.
            self.start_param_sync = lambda *_, **__: None
        # 0.19 keeps modules outside of the layers, embedding and output layer, gathered between
        # steps.
        if release.at_least(0, 19):
            gathers = self.module.all_gather_pipeline
            gathers.reset = partial(_reset, gathers.reset)


def communication_elements(model: torch.nn.Module) -> int:
    """Return the elements of two layers, as many as megatron-core's FSDP may gather and reduce at
    once.

    Its own default is no less than 10^9 elements, which would gather a small model whole.
    """
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    return 2 * max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=1)


def flat_buffers(chunk: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Return the flat buffers of megatron-core's FSDP by group of parameters; empty without it."""
    kept = {
        "weights": "model_weight_buffer",
        "gradients": "main_grad_buffer",
        "optimizer": "main_weight_buffer",
    }
    if isinstance(chunk, FullyShardedBuffers):
        for group in chunk.param_and_grad_buffer.parameter_groups:
            buffers = {part: getattr(group, name) for part, name in kept.items()}
            yield {
                part: [b.data] if b is not None and b.data is not None else []
                for part, b in buffers.items()
            }


def _reset(reset: Callable[..., None], **_: Any) -> None:
    """Free all that was gathered, as 0.16.1 does: the next forward gathers it again in any case."""
    reset(preserve_non_fsdp_units=False)


def _forget(parameter: Any) -> None:
    """Free a parameter's memory: megatron-core loses one that keeps it next to an empty weight."""
    empty = torch.nn.Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    vars(empty).update(vars(parameter))
    torch.utils.swap_tensors(parameter, empty)


def _restore(
    module: torch.nn.Module, before: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]
) -> None:
    """Give renewed parameters and buffers the attributes and constants of the old ones."""
    for name, old in before.items():
        new = module._parameters.get(name, module._buffers.get(name))
        assert new is not None
        vars(new).update(vars(old))
        if name in constants:
            new.data.copy_(constants[name])
