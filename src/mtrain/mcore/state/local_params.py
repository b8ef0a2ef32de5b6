"""The part of each parameter that a rank keeps between steps: all of it, or its FSDP shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mtrain.mcore import api as mcore
from mtrain.mcore.state.shard_specs import ShardSpec, shard_specs_of


@dataclass(frozen=True)
class LocalParam:
    """A parameter of this rank's model."""

    name: str
    """Its name in the unwrapped model."""
    param: torch.nn.Parameter
    """The parameter as the optimizer knows it."""
    made: torch.nn.Parameter
    """The parameter as its module made it, with its marks."""
    specs: list[ShardSpec]
    weight: torch.Tensor
    """The local memory of its weights, 1-D."""
    start: int = 0
    """First element of the parameter in that memory."""
    sharded: bool = False
    """Each data-parallel rank (of a replica) keeps another part of the weights."""


def unwrap(module: Any) -> Any:
    """Return the model inside data-parallel and mixed-precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank, 1-D and without its history."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)


def local_params(chunk: Any) -> list[LocalParam]:
    """Return the local part of every parameter of a chunk, wrapped or not."""
    model = unwrap(chunk)
    specs = shard_specs_of(model)
    if isinstance(chunk, mcore.MegatronFSDP):
        return list(_in_buffers(chunk.module.param_and_grad_buffer, specs))
    return [_in_parameter(name, p, specs[name]) for name, p in model.named_parameters()]


def _in_parameter(name: str, param: torch.nn.Parameter, specs: list[ShardSpec]) -> LocalParam:
    """Return a plain parameter, or FSDP2's: rows that torch gives to each rank in turn."""
    weight = local(param)
    if not isinstance(param, DTensor):
        return LocalParam(name, param, param, specs, weight)
    # torch splits as `torch.chunk` does: every rank has the quotient rounded up, the last ones less
    # or nothing.
    rows = param.shape[0]
    dim = param.device_mesh.ndim - 1
    chunk_rows = -(-rows // param.device_mesh.size(dim))
    first = min(rows, chunk_rows * param.device_mesh.get_local_rank(dim))
    return LocalParam(
        name, param, param, specs, weight, first * (param.numel() // rows), sharded=True
    )


def _in_buffers(buffers: Any, specs: dict[str, list[ShardSpec]]) -> Iterator[LocalParam]:
    """Yield parameters of megatron-core's FSDP: runs of elements of flat buffers."""
    for name, param in buffers.optimizer_named_parameters:
        group = buffers.parameter_groups[buffers.param_to_param_group[param.orig_param]]
        weights = group.model_weight_buffer
        item = weights.param_idx[param.orig_param]
        start, _ = weights.locate_item_in_global_item(item)
        own = name.removeprefix("module.")
        memory = weights.get_item(item)
        sharded = weights.is_data_distributed
        yield LocalParam(own, param, param.orig_param, specs[own], memory, start, sharded)
