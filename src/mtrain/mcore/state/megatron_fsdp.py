"""megatron-core's own FSDP over a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mtrain.config.engine import release
from mtrain.mcore import api as mcore
from mtrain.mcore.state.fsdp2 import LAYERS


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
            # The forward gathers what it needs; what is gathered at the end of a step would be kept
            # until then.
            self.start_param_sync = lambda *_, **__: None
        # 0.19 keeps modules outside of the layers, embedding and output layer, gathered between
        # steps.
        if release.at_least(0, 19):
            gathers = self.module.all_gather_pipeline
            gathers.reset = partial(_reset, gathers.reset)


def communication_elements(model: torch.nn.Module) -> int:
    """Return elements of two layers: what megatron-core's FSDP may gather and reduce at once.

    Its own default is no less than 10^9 elements, which would gather a small model whole.
    """
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    return 2 * max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=1)


def flat_buffers(chunk: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Return the flat buffers of megatron-core's FSDP for each group of parameters of a chunk;
    empty for other chunks.
    """
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
    """Take a parameter's memory: megatron-core loses one that keeps its own next to a weight that
    has none.
    """
    empty = torch.nn.Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    vars(empty).update(vars(parameter))
    torch.utils.swap_tensors(parameter, empty)


def _restore(
    module: torch.nn.Module, before: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]
) -> None:
    """Give parameters and buffers that were just made anew the attributes and constants of those
    before.
    """
    for name, old in before.items():
        new = module._parameters.get(name, module._buffers.get(name))
        assert new is not None
        vars(new).update(vars(old))
        if name in constants:
            new.data.copy_(constants[name])
