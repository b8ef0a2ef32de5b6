"""Where each local tensor lies in the whole model: one list of slots for weights and optimizer state.

Checkpoints, layout-independent initial weights and the comparison of layouts all speak of slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtrain.mcore import api as mcore


@dataclass(frozen=True)
class Slot:
    """A box of a whole tensor, and the local memory that holds it (or a flat part of it)."""

    key: str
    """Name of the whole tensor, the same in every layout."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Size of the box; leading axes that count layers or experts have size 1."""
    tensor: torch.Tensor
    """Local memory: the box without its counting axes, or 1-D with `flat`."""
    flat: tuple[int, int] | None = None
    """Range of the row-major box that `tensor` holds; None: all of it."""
    primary: bool = True
    """Whether this rank, of those that hold the same data, is the one that saves it."""
    param: torch.nn.Parameter | None = None
    """The parameter that this slot is part of; None for buffers."""


def unwrap(module: Any) -> Any:
    """The model inside DistributedDataParallel and mixed-precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


@contextmanager
def gathered(chunks: list[Any]) -> Iterator[None]:
    """All weights whole and no gather under way: wherever weights are read outside a training step.

    With overlapped parameter gather, the weights of other ranks' shards are stale between an update and the next
    forward.
    """
    overlapping = [c for c in chunks if getattr(c, "remove_forward_pre_hook_handles", None)]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in overlapping:
        chunk.enable_forward_pre_hook()


def model_slots(chunks: list[Any], *, trainable: bool = False) -> list[Slot]:
    """Slots of all weights (and, unless `trainable`, persistent buffers) of this rank's model chunks."""
    slots = []
    for chunk in chunks:
        model = unwrap(chunk)
        params = {p.data_ptr(): p for p in model.parameters() if p.numel()}
        for entry in _entries(model):
            param = params.get(entry.data.data_ptr())
            if trainable and param is None:
                continue
            for sharded in _pieces(entry):
                slots.append(_slot(sharded, param))
    return slots


def optimizer_slots(chunks: list[Any], optimizer: Any, *, allocate: bool = False) -> list[Slot]:
    """Slots of the optimizer's main weights and moments.

    Keys are the weight's key behind `main_weight.`, `exp_avg.`, ... Where the optimizer works on a flat shard of a
    parameter (the distributed optimizer), slots are flat parts of the parameter's boxes, and every data-parallel
    rank saves its own. `allocate` makes the state that an optimizer has only after its first step.
    """
    entries = _entries_by_param(chunks)
    slots = []
    for shard in state_shards(optimizer):
        if allocate:
            shard.allocate()
        for name, tensor in shard.tensors():
            slots += _flat_slots(name, entries[shard.param], shard, tensor)
    return slots


def gradient_slots(chunks: list[Any], optimizer: Any) -> list[Slot]:
    """Slots of the gradient that each parameter holds after the backward (`main_grad`).

    With the distributed optimizer a rank's gradient is whole only in the range that it owns, so slots are that range.
    """
    entries = _entries_by_param(chunks)
    slots = []
    for shard in state_shards(optimizer):
        gradient = shard.param.main_grad.detach().view(-1)  # type: ignore[attr-defined]
        own = gradient[shard.start : shard.start + shard.main.numel()]
        slots += _flat_slots("", entries[shard.param], shard, own)
    return slots


@dataclass(frozen=True)
class StateShard:
    """What one optimizer keeps for one parameter, or for the flat range of it that this rank owns."""

    param: torch.nn.Parameter
    main: torch.Tensor
    start: int
    inner: torch.optim.Optimizer
    spread: bool
    """Each data-parallel rank holds another range."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The main weight, unless it is the weight itself, and every moment, by name."""
        if self.main.untyped_storage().data_ptr() != self.param.untyped_storage().data_ptr():
            yield "main_weight", self.main
        for name, value in self.inner.state.get(self.main, {}).items():
            if torch.is_tensor(value) and value.shape == self.main.shape:
                yield name, value

    def allocate(self) -> None:
        """Make zero moments, with a step counter of its own, where the optimizer has none yet."""
        state = self.inner.state[self.main]
        names = ("exp_avg", "exp_avg_sq") if "betas" in self.inner.defaults else ("momentum_buffer",)
        for name in names:
            state.setdefault(name, torch.zeros_like(self.main))
        if isinstance(self.inner, torch.optim.Adam):
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """megatron-core's optimizers without the chain around them, those that hold no parameter left out."""
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    return [leaf for leaf in leaves if leaf.optimizer is not None]


def state_shards(optimizer: Any) -> Iterator[StateShard]:
    """What every leaf optimizer keeps, parameter by parameter."""
    for leaf in leaf_optimizers(optimizer):
        inner = leaf.optimizer
        if isinstance(leaf, mcore.DistributedOptimizer):
            for param, (group, order) in leaf.model_param_group_index_map.items():
                main = inner.param_groups[group]["params"][order]
                start = leaf._get_model_param_range_map(param)["param"].start
                yield StateShard(param, main, start, inner, spread=True)
        elif isinstance(leaf, mcore.Float16OptimizerWithFloat16Params):
            pairs = zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True)
            for params, mains in pairs:
                for param, main in zip(params, mains, strict=True):
                    yield StateShard(param, main, 0, inner, spread=False)
            for params in leaf.fp32_from_fp32_groups:
                for param in params:
                    yield StateShard(param, param, 0, inner, spread=False)
        else:
            for group in inner.param_groups:
                for param in group["params"]:
                    yield StateShard(param, param, 0, inner, spread=False)


def get_step(optimizer: Any) -> int:
    """How many updates the optimizer has made (for Adam's bias correction).

    Raises:
        RuntimeError: its parameters disagree, which one shared counter after a resume would cause.
    """
    steps = {
        int(state["step"])
        for leaf in leaf_optimizers(optimizer)
        for state in leaf.optimizer.state.values()
        if "step" in state
    }
    steps |= {
        int(g["step"]) for leaf in leaf_optimizers(optimizer) for g in leaf.optimizer.param_groups if "step" in g
    }
    if len(steps) > 1:
        raise RuntimeError(f"the optimizer's parameters have made different numbers of updates: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_step(optimizer: Any, step: int) -> None:
    """Set the number of updates, each parameter with a counter of its own."""
    for leaf in leaf_optimizers(optimizer):
        for state in leaf.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], step)
        for group in leaf.optimizer.param_groups:
            if "step" in group:
                group["step"] = step


def _entries_by_param(chunks: list[Any]) -> dict[torch.nn.Parameter, Any]:
    """What each trainable parameter is in the whole model."""
    entries: dict[torch.nn.Parameter, Any] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        by_memory = {e.data.data_ptr(): e for e in _entries(model)}
        entries |= {p: by_memory[p.data_ptr()] for p in model.parameters() if p.requires_grad and p.numel()}
    return entries


def _entries(model: Any) -> list[Any]:
    """Sharded tensors and factories of a model's state; objects without tensor data are left out."""
    metadata = {"dp_cp_group": mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list | tuple):
            for value in node:
                walk(value)
        elif isinstance(node, mcore.ShardedTensor | mcore.ShardedTensorFactory) and node.data is not None:
            found.append(node)

    walk(model.sharded_state_dict(metadata=metadata))
    return found


def _is_factory(entry: Any) -> bool:
    return isinstance(entry, mcore.ShardedTensorFactory)


def _pieces(entry: Any) -> list[Any]:
    """The sharded tensors that an entry stands for (a gated MLP's fused weight is two halves)."""
    if not _is_factory(entry):
        return [entry]
    built = entry.build()
    if isinstance(built, dict):
        return list(built.values())
    return list(built) if isinstance(built, list | tuple) else [built]


def _primary(replica_id: Any, *, ignore_data_parallel: bool = False) -> bool:
    if isinstance(replica_id, int):
        return replica_id == 0 or ignore_data_parallel
    return not any(replica_id[:-1] if ignore_data_parallel else replica_id)


def _slot(sharded: Any, param: torch.nn.Parameter | None) -> Slot:
    data = sharded.data.detach()
    lead = len(sharded.global_shape) - data.ndim
    return Slot(
        key=sharded.key,
        global_shape=tuple(sharded.global_shape),
        offset=tuple(sharded.global_offset),
        shape=(1,) * lead + tuple(data.shape),
        tensor=data,
        primary=_primary(sharded.replica_id),
        param=param,
    )


def _flat_slots(name: str, entry: Any, shard: StateShard, tensor: torch.Tensor) -> list[Slot]:
    """Slots of `tensor`, which belongs to elements [start, start + numel) of the parameter, on each of its boxes."""
    start, stop = shard.start, shard.start + tensor.numel()
    values = tensor.detach().view(-1)
    base = entry.data.data_ptr()
    slots = []
    for sharded in _pieces(entry):
        box = _slot(sharded, shard.param)
        if not box.tensor.is_contiguous():
            raise RuntimeError(f"{box.key} is not contiguous in its parameter; its optimizer state cannot be cut")
        first = (box.tensor.data_ptr() - base) // box.tensor.element_size()
        lo, hi = max(start, first), min(stop, first + box.tensor.numel())
        if lo >= hi:
            continue
        whole = hi - lo == box.tensor.numel()
        local = values[lo - start : hi - start]
        slots.append(
            replace(
                box,
                key=f"{name}.{box.key}" if name else box.key,
                tensor=local.view(box.tensor.shape) if whole else local,
                flat=None if whole else (lo - first, hi - first),
                primary=_primary(sharded.replica_id, ignore_data_parallel=shard.spread),
            )
        )
    return slots
