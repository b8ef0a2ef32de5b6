"""The place of each local tensor in the whole model: one list of shards for weights and optimizer
state.

Checkpoints, layout-independent initial weights and the comparison of layouts all speak of shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mtrain.mcore import api as mcore
from mtrain.mcore.state.local_params import local, local_params, unwrap
from mtrain.mcore.state.optimizer_state import StateShard, factors, refresh_copies, state_shards
from mtrain.mcore.state.shard_specs import ShardSpec, shard_specs_of


@dataclass(frozen=True)
class TensorShard:
    """A part of a whole tensor, and the local memory that holds it (or a flat part of it)."""

    key: str
    """Name of the whole tensor in every layout: `model/<weight>`, or `optim/<state>/<weight>`."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Size of the part; leading axes that count layers or experts have size 1."""
    tensor: torch.Tensor
    """Local memory: the part without its counting axes, or 1-D with `flat`."""
    flat: tuple[int, int] | None = None
    """Range of the row-major part that `tensor` holds; None: all of it."""
    primary: bool = True
    """True if this rank, among those with the same data, is the one that saves it."""
    param: torch.nn.Parameter | None = None
    """The parameter that this shard is part of; None for buffers."""
    lead: int = 0
    """Number of axes of the part that count layers or experts."""

    @property
    def weight(self) -> str:
        """Return the name of the weight that it is, or whose state it is."""
        return self.key.rpartition("/")[2]


@contextmanager
def gathered(chunks: list[Any]) -> Iterator[None]:
    """Finish all weight gathers, so that weights can be read outside a training step.

    With overlapped parameter gather, the weights of other ranks' shards are stale between an update
    and the next forward.
    """
    overlapping = [c for c in chunks if getattr(c, "remove_forward_pre_hook_handles", None)]
    # Disabling the hooks gathers all weights at once, and leaves them current.
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    _forget_gathered(chunks)
    yield
    for chunk in overlapping:
        chunk.enable_forward_pre_hook()


def refresh(chunks: list[Any], optimizer: Any = None) -> None:
    """Update everything derived from the weights after a write through their shards."""
    _forget_gathered(chunks)
    if optimizer is not None:
        refresh_copies(optimizer)


def make_main_weights(chunks: list[Any]) -> None:
    """Copy weights to the main weights that megatron-core's FSDP keeps apart from them."""
    for chunk in chunks:
        if isinstance(chunk, mcore.MegatronFSDP):
            _copy_to_main_weights(chunk.module.param_and_grad_buffer)


def model_shards(chunks: list[Any], *, trainable: bool = False) -> list[TensorShard]:
    """Return shards of weights (and, unless `trainable`, buffers) of this rank's model chunks."""
    shards = []
    for chunk in chunks:
        for own in local_params(chunk):
            shards += _pieces(own.specs, own.weight, own.start, sharded=own.sharded, param=own.made)
        if not trainable:
            model = unwrap(chunk)
            specs = shard_specs_of(model)
            for name, buffer in model.named_buffers():
                shards += _pieces(specs.get(name, []), buffer.detach().view(-1), 0, sharded=False)
    return shards


def optimizer_shards(chunks: list[Any], optimizer: Any) -> list[TensorShard]:
    """Return shards of the optimizer's main weights and moments.

    States are `main_weight`, `exp_avg`, ... Where the optimizer works on a flat shard of a
    parameter (the distributed optimizer, FSDP), shards are flat parts of the parameter, and every
    data-parallel rank saves its own. What an optimizer keeps in pieces is whole and in fp32 here,
    and a copy. What comes with the first update, which fp16 may still be waiting for, is made: a
    checkpoint has all that is read back.
    """
    states = list(state_shards(chunks, optimizer))
    for state in states:
        state.allocate()
    shards = [
        shard
        for state in states
        for name, tensor in state.tensors()
        for shard in _state(state, name, tensor)
    ]
    return shards + list(_factors(chunks, optimizer))


def optimizer_shards_to_fill(chunks: list[Any], optimizer: Any) -> Iterator[TensorShard]:
    """Yield the same shards to be written one after the other, of state that is made where it comes
    with the first step.

    What is kept in pieces is taken apart again once its shards are written, when the next one is
    asked for.
    """
    for state in state_shards(chunks, optimizer):
        state.allocate()
        for name, tensor in state.tensors():
            yield from _state(state, name, tensor)
            state.store(name, tensor)
    yield from _factors(chunks, optimizer)


def _state(state: StateShard, name: str, tensor: torch.Tensor) -> list[TensorShard]:
    return _pieces(state.local_param.specs, tensor, state.start, sharded=state.sharded, name=name)


def _factors(chunks: list[Any], optimizer: Any) -> Iterator[TensorShard]:
    """Return the factors that an optimizer keeps of whole matrices: a tensor [n, n] of each side,
    after the axes that count layers and experts, and one that counts blocks where those are
    matrices of their own.
    """
    for own, found, sharded in factors(chunks, optimizer):
        spec = own.specs[0]
        lead = spec.lead + (found.block is not None)
        at, of = ((), ()) if found.block is None else ((found.block[0],), (found.block[1],))
        primary = (
            spec.primary(sharded=sharded) and not found.copy and not (sharded and _copy_index())
        )
        for name, tensor in found.factors.items():
            yield TensorShard(
                key=f"optim/{name}/{spec.key}",
                global_shape=(*spec.global_shape[: spec.lead], *of, *tensor.shape),
                offset=(*spec.offset[: spec.lead], *at, 0, 0),
                shape=(*(1,) * lead, *tensor.shape),
                tensor=tensor,
                primary=primary,
                lead=lead,
            )


def gradient_shards(chunks: list[Any], optimizer: Any) -> list[TensorShard]:
    """Return shards of the gradient that each parameter holds after the backward.

    With the distributed optimizer a rank's gradient is whole only in the range that it owns: that
    is its shard.
    """
    shards = []
    for state in state_shards(chunks, optimizer):
        shards += _pieces(
            state.local_param.specs, state.gradient(), state.start, sharded=state.sharded
        )
    return shards


def main_weight_shards(chunks: list[Any], optimizer: Any) -> Iterator[TensorShard]:
    """Yield shards of the weights that the optimizer updates: fp32 ones where it keeps such."""
    for state in state_shards(chunks, optimizer):
        main = dict(state.tensors()).get("main_weight", local(state.main))
        yield from _pieces(state.local_param.specs, main, state.start, sharded=state.sharded)


def moment_shards(chunks: list[Any], optimizer: Any) -> Iterator[tuple[str, TensorShard]]:
    """Yield the name of each moment that the optimizer has by now, and shards of it."""
    for state in state_shards(chunks, optimizer):
        for name, tensor in state.tensors():
            if name != "main_weight":
                yield from ((name, shard) for shard in _state(state, name, tensor))


@torch.no_grad()
def _copy_to_main_weights(buffers: Any) -> None:
    """Copy weights of megatron-core's FSDP to separate main weights; 0.19 has no such method."""
    for group in buffers.parameter_groups:
        main = group.main_weight_buffer
        weights = group.model_weight_buffer
        if main is not None:
            own = (
                weights.get_shard_from_local_buffer() if main.is_data_distributed else weights.data
            )
            main.data.copy_(own)


def _forget_gathered(chunks: list[Any]) -> None:
    """Let megatron-core's FSDP wait for gathers under way and free their memory."""
    for chunk in chunks:
        if isinstance(chunk, mcore.MegatronFSDP):
            chunk.module.synchronize_param_gather()


def _copy_index() -> int:
    """Return the index of this rank's copy among those of HSDP or the distributed optimizer."""
    group = mcore.parallel_state.get_inter_distributed_optimizer_instance_group(
        check_initialized=False
    )
    return group.rank() if group is not None else 0


def _pieces(
    specs: list[ShardSpec],
    values: torch.Tensor,
    start: int,
    *,
    sharded: bool,
    name: str = "",
    param: torch.nn.Parameter | None = None,
) -> list[TensorShard]:
    """Return shards of `values`, elements [start, start + numel) of a parameter, by spec."""
    stop = start + values.numel()
    shards = []
    for spec in specs:
        # A flat range of an optimizer may begin inside of one spec and end inside of another.
        lo = max(start, spec.first)
        hi = min(stop, spec.first + spec.numel)
        if lo >= hi:
            continue
        whole = hi - lo == spec.numel
        here = values[lo - start : hi - start]
        shards.append(
            TensorShard(
                key=f"optim/{name}/{spec.key}" if name else f"model/{spec.key}",
                global_shape=spec.global_shape,
                offset=spec.offset,
                shape=spec.shape,
                tensor=here.view(spec.shape[spec.lead :]) if whole else here,
                flat=None if whole else (lo - spec.first, hi - spec.first),
                # Replicas, of HSDP or of the distributed optimizer, have the same shards: those of
                # the first are saved.
                primary=spec.primary(sharded=sharded) and not (sharded and _copy_index()),
                param=param,
                lead=spec.lead,
            )
        )
    return shards
