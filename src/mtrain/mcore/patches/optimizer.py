"""Patches of optimizers: gradient norms, state of torch's Adam, and offloading to the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
from packaging.version import Version

from mtrain.config.engine.release import UNTIL_0_16
from mtrain.mcore.patches.patch import NO_TE, core, patch


@patch(
    "gradient-norm",
    "utils.py:1205",
    "Without Apex the norm is torch.norm in fp32, on a CPU with an error of 1e-5 at a million"
    " elements and 7e-5 at four: layouts clip differently. On a GPU the host waits for the norm"
    " of each gradient.",
    NO_TE,
)
def gradient_norm() -> None:
    """Add squares in fp32 over a few thousand elements, then in fp64, without device syncs."""

    def l2_norm(
        chunk_size: int, flag: Any, lists: list[list[torch.Tensor]], per_tensor: bool, *_: Any
    ) -> Any:
        return norm_of_all([t for tensors in lists for t in tensors]).view(1), None

    core("optimizer.clip_grads").l2_norm_impl = l2_norm


def norm_of_all(tensors: list[torch.Tensor], *, in_rows: bool | None = None) -> torch.Tensor:
    """Return the norm of tensors as one vector: fp32 [], on the device of the first.

    `in_rows` by default on a CPU, whose norms of many elements are inexact; a GPU adds up as a
    tree, and takes many tensors in one launch.
    """
    # With offloading, some of the tensors are in host memory.
    device = tensors[0].device
    if in_rows if in_rows is not None else tensors[0].is_cpu:
        norms = [norm.to(device) for t in tensors for norm in _norms_of_rows(t.reshape(-1))]
    else:
        norms = [
            norm.to(device)[None] for norm in torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
        ]
    return torch.linalg.vector_norm(torch.cat(norms).double()).float()


def _norms_of_rows(flat: torch.Tensor, width: int = 4096) -> list[torch.Tensor]:
    whole = flat.numel() // width * width
    rows = flat[:whole].view(-1, width)
    rest = flat[whole:]
    return [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in (rows, rest[None])
    ]


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam)


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate zero moments and a step counter for each parameter, as before a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


@patch(
    "optimizer-state-before-first-step",
    "optimizer/distrib_optimizer.py:642",
    "state_dict() takes the step from torch Adam's state, which is empty before the first step:"
    " AssertionError.",
    NO_TE,
)
def optimizer_state_before_first_step() -> None:
    """Allocate Adam's state before its first use."""
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _is_torch_adam(self.optimizer):
            _allocate_adam_state(self.optimizer)
        return original(self)

    cls.state_dict = state_dict


@patch(
    "optimizer-state-loading",
    "optimizer/distrib_optimizer.py:940",
    "Loading copies into every state tensor of torch Adam: KeyError 'step', or an in-place"
    " change of a leaf.",
    NO_TE,
)
def optimizer_state_loading() -> None:
    """Copy saved tensors into the moments and the main weight only."""
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls._set_main_param_and_optimizer_states

    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self: Any, model_param: Any, tensors: dict[str, Any]
    ) -> Any:
        if not _is_torch_adam(self.optimizer):
            return original(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        # "step" is not loaded per parameter, or is a placeholder there; load_state_dict sets it
        for name, state in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step" and name in tensors:
                state.copy_(tensors[name])
        return None

    cls._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


@patch(
    "optimizer-step-counters",
    "optimizer/distrib_optimizer.py:820",
    "Loading gives all parameters one step tensor; torch Adam then counts one step per"
    " parameter: silently wrong from the second step after a resume.",
    NO_TE,
)
def optimizer_step_counters() -> None:
    """Give each parameter a step counter of its own."""
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if _is_torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()

    cls.load_state_dict = load_state_dict


@patch(
    "te-version",
    "utils.py:348",
    "Without TransformerEngine, an optimizer with main weights asks for a version of it:"
    " TypeError.",
    NO_TE,
    UNTIL_0_16,
)
def te_version() -> None:
    """Say that it is older than any."""
    core("utils").get_te_version = lambda: Version("0")


@patch(
    "offloaded-shards",
    "optimizer/distrib_optimizer.py:603",
    "The distributed optimizer's shards of fp32 weights are views, which the offloading"
    " optimizer does not take: ValueError about a non-leaf tensor.",
    "everywhere",
)
def offloaded_shards() -> None:
    """Let views of fp32 weights be optimized, in whatever form parameters are handed over."""
    cls = core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    original = cls.add_param_group

    @functools.wraps(original)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        # An iterator would be exhausted here, before torch reads it.
        if not isinstance(params, torch.Tensor | list | tuple | set):
            params = list(params)
            param_group["params"] = params
        for given in [params] if isinstance(params, torch.Tensor) else params:
            # torch also takes pairs of a name and a parameter.
            param = given[1] if isinstance(given, tuple) else given
            if isinstance(param, torch.Tensor) and not param.is_leaf:
                param.retain_grad()
        original(self, param_group)

    cls.add_param_group = add_param_group


@patch(
    "offloaded-main-weights",
    "optimizer/optimizer.py:676",
    "Main weights replace 16-bit ones that an offloading optimizer has copied already: KeyError"
    " at an update.",
    "everywhere",
)
def offloaded_main_weights() -> None:
    """Copy the weights that are optimized to host memory."""
    cls = core("optimizer.optimizer").Float16OptimizerWithFloat16Params
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, *args, **kwargs)
        if isinstance(
            optimizer, core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
        ):
            optimizer._init_sub_optimizers()

    cls.__init__ = __init__


@patch(
    "offloaded-copies",
    "optimizer/cpu_offloading/hybrid_optimizer.py:287",
    "A copy in host memory is known by its device; where the CPU is the device, none is, and"
    " weights that are offloaded are silently never updated.",
    "off CUDA",
)
def offloaded_copies() -> None:
    """Know copies in host memory by having made them."""
    cls = core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    original = cls._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def groups(self: Any, offload_fraction: float) -> Any:
        # The original sorts by `param.is_cuda`, which is `is_cpu` where it is rewritten for a CPU:
        # every copy is among the device's groups.
        host, device, copies, originals, fp32 = original(self, offload_fraction)
        cut = [({**g, "params": []}, {**g, "params": []}) for g in device]
        for group, (copied, kept) in zip(device, cut, strict=True):
            for param in group["params"]:
                (copied if param in originals else kept)["params"].append(param)
        host = [*host, *(copied for copied, _ in cut if copied["params"])]
        return host, [kept for _, kept in cut if kept["params"]], copies, originals, fp32

    cls._get_sub_optimizer_param_groups = groups
