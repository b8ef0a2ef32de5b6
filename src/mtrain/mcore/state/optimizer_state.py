"""The state that megatron-core's optimizers keep for each parameter, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mtrain_kernels.optimizer.fused_adam import MASTER, FusedAdam

from mtrain.mcore import api as mcore
from mtrain.mcore.state.local_params import LocalParam, local, local_params
from mtrain.mcore.state.optimizers import Elementwise
from mtrain.mcore.state.whole_matrices import Owned, ParallelSoap, WholeMatrices


@dataclass(frozen=True)
class StateShard:
    """The state of one optimizer for one parameter, or for the range of it that this rank owns."""

    local_param: LocalParam
    main: torch.Tensor
    """The weights that are updated, as megatron-core's optimizer knows them."""
    start: int
    sharded: bool
    """Each data-parallel rank (of a replica) owns another range."""
    inner: torch.optim.Optimizer
    """torch's optimizer that updates them."""
    updated: torch.Tensor
    """Tensor that the optimizer updates: `main`, or a copy of it in host memory."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the main weight, unless it is the weight itself, and every moment, by name, each
        1-D.

        Each is the memory itself, or an fp32 copy of a tensor in another format (see `store`).
        """
        # An fp32 weight is its own main weight: the same memory, saved once.
        main = local(self.main)
        pieces = self._in_pieces()
        if (
            main.untyped_storage().data_ptr()
            != self.local_param.weight.untyped_storage().data_ptr()
        ):
            yield "main_weight", main
        for name, value in self.inner.state.get(self.updated, {}).items():
            if name in pieces:
                own: Any = self.inner
                whole = own.get_unscaled_state(self.updated, name)
                yield "main_weight" if name == MASTER else name, local(whole)
            elif name != MASTER and torch.is_tensor(value) and value.shape == self.updated.shape:
                yield name, local(value)

    def store(self, name: str, value: torch.Tensor) -> None:
        """Store the values of a tensor of `tensors` that was a copy."""
        kept_as = MASTER if name == "main_weight" else name
        if kept_as in self._in_pieces():
            own: Any = self.inner
            own.set_scaled_state(self.updated, kept_as, value.view_as(self.updated))

    def _in_pieces(self) -> list[str]:
        """Return optimizers' state kept in pieces or with scales; their methods access it."""
        if not isinstance(self.inner, FusedAdam):
            return []
        state = self.inner.state.get(self.updated, {})
        return [name for name, kept in state.items() if name == MASTER or kept.dtype == torch.uint8]

    def allocate(self) -> None:
        """Make zero moments, with a step counter of its own, where the optimizer has none yet."""
        if isinstance(self.inner, FusedAdam | Elementwise):
            if not self.inner.state[self.updated]:
                self.inner.initialize_state(self.updated)
            return
        state = self.inner.state[self.updated]
        group = self.inner.param_groups[0]
        for name in self.inner.state_names:  # type: ignore[attr-defined]
            # Not `setdefault`: it would fill as much memory again, at every save.
            if name not in state:
                state[name] = torch.zeros_like(self.updated)
        if isinstance(self.inner, torch.optim.Adam):
            # torch's fused Adam reads its counter on the device, the others on the host.
            device = self.updated.device if group.get("fused") else None
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=device))

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the range after the backward, 1-D."""
        param = self.local_param.param
        size = local(self.main).numel()
        # A parameter of megatron-core's FSDP, which has no gradient where this rank owns nothing.
        if hasattr(param, "orig_param"):
            return local(param.grad) if param.grad is not None else torch.empty(0)
        start = self.start - self.local_param.start
        return local(param.main_grad)[start : start + size]  # type: ignore[attr-defined]


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """Return megatron-core's optimizers outside their chain, except those without parameters."""
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    return [leaf for leaf in leaves if leaf.optimizer is not None]


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers, those of an offloading one included."""
    found: list[torch.optim.Optimizer] = []
    for leaf in leaf_optimizers(optimizer):
        hybrid = isinstance(leaf.optimizer, mcore.HybridDeviceOptimizer)
        found += leaf.optimizer.sub_optimizers if hybrid else [leaf.optimizer]
    return found


def offloading(optimizer: Any) -> list[Any]:
    """Return the optimizers of megatron-core that update a part of the weights in host memory."""
    leaves = (leaf.optimizer for leaf in leaf_optimizers(optimizer))
    return [leaf for leaf in leaves if isinstance(leaf, mcore.HybridDeviceOptimizer)]


def name_states(optimizer: Any, names: tuple[str, ...]) -> None:
    """Name the state tensors of a parameter: a checkpoint has them before the first update."""
    for inner in inner_optimizers(optimizer):
        inner.state_names = names  # type: ignore[attr-defined]


def loss_scale(optimizer: Any) -> tuple[float, bool] | None:
    """Return the factor on the loss that the next update is made with, and whether skipping it
    would lower the factor.

    It would not at its floor, of a constant factor, or of an infinite one. None where there is no
    such factor.
    """
    for leaf in leaf_optimizers(optimizer):
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None:
            value = float(scaler.scale)
            return value, math.isfinite(value) and value > float(
                getattr(scaler, "min_scale", value)
            )
    return None


def state_shards(chunks: list[Any], optimizer: Any) -> Iterator[StateShard]:
    """Yield the state of every leaf optimizer, parameter by parameter."""
    own = {k.param: k for chunk in chunks for k in local_params(chunk)}
    for leaf in leaf_optimizers(optimizer):
        inner = {
            p: (sub, p)
            for sub in _subs(leaf)
            for group in sub.param_groups
            for p in group["params"]
        }
        if isinstance(leaf.optimizer, mcore.HybridDeviceOptimizer):
            inner = {
                leaf.optimizer.inner_param_to_orig_param[p]: found for p, found in inner.items()
            }
        for param, main, start, sharded in _ranges(leaf, own):
            yield StateShard(own[param], main, start, sharded, *inner[main])


def distribute(chunks: list[Any], optimizer: Any) -> None:
    """Tell optimizers of whole matrices where the parts of those are."""
    own = {k.param: k for chunk in chunks for k in local_params(chunk)}
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf.optimizer, ParallelSoap):
            leaf.optimizer.know(
                {id(p): [s.shape[s.lead] for s in k.specs] for p, k in _known(leaf, own).items()}
            )
        if isinstance(leaf, mcore.DistributedOptimizer) and isinstance(
            leaf.optimizer, WholeMatrices
        ):
            leaf.optimizer.distribute(leaf)


def factors(chunks: list[Any], optimizer: Any) -> Iterator[tuple[LocalParam, Owned, bool]]:
    """Return this rank's factors of whole matrices, and whether data-parallel ranks differ."""
    own = {k.param: k for chunk in chunks for k in local_params(chunk)}
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf.optimizer, ParallelSoap):
            known = _known(leaf, own)
            for found in leaf.optimizer.owned():
                yield known[found.param], found, isinstance(leaf, mcore.DistributedOptimizer)


def _known(leaf: Any, own: dict[torch.nn.Parameter, LocalParam]) -> dict[torch.Tensor, LocalParam]:
    """Return the local part of a parameter under each parameter that an optimizer of whole matrices
    may know it by: the model's, or a whole main weight.
    """
    if isinstance(leaf, mcore.DistributedOptimizer):
        return dict(own.items())
    return {main: own[param] for param, main, _, _ in _ranges(leaf, own)}


def refresh_copies(optimizer: Any) -> None:
    """Copy main weights again to where an offloading optimizer updates copies of them."""
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf.optimizer, mcore.HybridDeviceOptimizer):
            for main, copied in leaf.optimizer.param_to_inner_param.items():
                if copied is not main:
                    copied.data.copy_(main.data)


def get_step(optimizer: Any) -> int:
    """Return how many updates the optimizer has made (for Adam's bias correction).

    Raises:
        RuntimeError: its parameters disagree, which one shared counter after a resume would cause.
    """
    inner = inner_optimizers(optimizer)
    # A rank that has no element of a parameter does not count its steps.
    steps = {
        int(s["step"])
        for o in inner
        for p, s in o.state.items()
        if "step" in s and local(p).numel()
    }
    steps |= {int(group["step"]) for o in inner for group in o.param_groups if "step" in group}
    if len(steps) > 1:
        raise RuntimeError(
            f"the optimizer's parameters have made different numbers of updates: {sorted(steps)}"
        )
    return steps.pop() if steps else 0


def set_step(optimizer: Any, step: int) -> None:
    """Set the number of updates, each parameter with a counter of its own."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], step)
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = step


def _subs(leaf: Any) -> list[torch.optim.Optimizer]:
    hybrid = isinstance(leaf.optimizer, mcore.HybridDeviceOptimizer)
    return list(leaf.optimizer.sub_optimizers) if hybrid else [leaf.optimizer]


def _ranges(
    leaf: Any, own: dict[torch.nn.Parameter, LocalParam]
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int, bool]]:
    """Yield each parameter of a leaf, its main weights, their offset, and any other owners."""
    groups = leaf.optimizer.param_groups
    if isinstance(leaf, mcore.DistributedOptimizer) and leaf.ddp_config.use_megatron_fsdp:
        for param in (p for group in groups for p in group["params"]):
            yield param, param, param.megatron_fsdp_slice.start, True
    elif isinstance(leaf, mcore.DistributedOptimizer):
        for param, (group, order) in leaf.model_param_group_index_map.items():
            yield (
                param,
                groups[group]["params"][order],
                leaf._get_model_param_range_map(param)["param"].start,
                True,
            )
    else:
        pairs = [(p, p) for group in groups for p in group["params"]]
        if isinstance(leaf, mcore.Float16OptimizerWithFloat16Params):
            pairs = [(p, p) for group in leaf.fp32_from_fp32_groups for p in group]
            for params, mains in zip(
                leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True
            ):
                pairs += zip(params, mains, strict=True)
        for param, main in pairs:
            yield param, main, own[param].start, own[param].sharded
