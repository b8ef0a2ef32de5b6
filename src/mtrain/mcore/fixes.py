"""Defects of megatron-core 0.16.1 that configuration cannot avoid, each mended once when the door is opened.

Each has a test in `tests/dist/test_door_fixes.py` that fails without it. At an upgrade of megatron-core every
entry is to be looked up again: the reason says what to look for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch

from mtrain.devices.base import Device
from mtrain.mcore.fix import Fix, Where, core
from mtrain.mcore.fixes_fsdp import FSDP_FIXES


def apply_fixes(device: Device, without: frozenset[str] = frozenset()) -> None:
    """Apply every fix that this device and installation need, but those in `without`; the door calls this once.

    Raises `ValueError` for an unknown name.
    """
    unknown = without - {fix.name for fix in FIXES}
    if unknown:
        raise ValueError(f"no such fixes: {', '.join(sorted(unknown))}")
    needed = {
        "everywhere": True,
        "without TransformerEngine": importlib.util.find_spec("transformer_engine") is None,
        "off CUDA": device.adapts_megatron,
    }
    for fix in FIXES:
        if needed[fix.applies] and fix.name not in without:
            fix.apply()


def _router_gemm() -> None:
    core("transformer.moe.moe_utils").te_general_gemm = None


def _mla_flag() -> None:
    core("transformer.multi_latent_attention").HAVE_TE = False


def _mla_down_projection() -> None:
    from mtrain.mcore.layers import DuplicatedLinear

    core("transformer.multi_latent_attention").Linear = DuplicatedLinear


def _mla_query_norm() -> None:
    cls = core("transformer.multi_latent_attention").MLASelfAttention
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    cls.__init__ = __init__


def _reduce_result() -> None:
    def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() > 1:
            input_ = input_.contiguous()
            torch.distributed.all_reduce(input_, group=group)
        return input_

    core("tensor_parallel.mappings")._reduce = _reduce


def _moe_loss_tokens() -> None:
    router, moe = core("transformer.moe.router"), core("transformer.moe.moe_utils")
    cls = router.TopKRouter
    attach, z_loss = cls.attach_and_log_load_balancing_loss, cls.apply_z_loss

    @functools.wraps(attach)
    def attach_whole(self: Any, activation: Any, coeff: Any, loss: Any, name: str, group: Any, *args: Any, **kw: Any):  # type: ignore[no-untyped-def]
        if self.calculate_per_token_loss:
            local = kw.get("valid_token_count")
            kw["valid_token_count"] = (activation.shape[0] if local is None else local) * group.size()
        return attach(self, activation, coeff, loss, name, group, *args, **kw)

    @functools.wraps(z_loss)
    def apply_z_loss(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        if not self.calculate_per_token_loss or self.config.moe_z_loss_coeff is None:
            return z_loss(self, logits, padding_mask)
        scale, tokens = moe.MoEAuxLossAutoScaler, logits.shape[0] if padding_mask is None else (~padding_mask).sum()
        if self.training and torch.is_grad_enabled():
            loss = moe.z_loss_func(logits, self.config.moe_z_loss_coeff, padding_mask=padding_mask)
            logits = scale.apply(logits, loss * tokens)
            layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
            share = loss / self.config.moe_z_loss_coeff / self.tp_cp_group.size()
            moe.save_to_aux_losses_tracker("z_loss", share, self.layer_number, layers)
        return logits

    cls.attach_and_log_load_balancing_loss = attach_whole
    cls.apply_z_loss = apply_z_loss


def _uneven_splits() -> None:
    mappings, dist = core("tensor_parallel.mappings"), torch.distributed
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kw: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kw)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(*sizes, 1), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter)
    def scatter_uneven(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kw: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *args, **kw)
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _gradient_norm() -> None:
    def l2_norm(chunk_size: int, flag: Any, lists: list[list[torch.Tensor]], per_tensor: bool, *_: Any) -> Any:
        norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for tensors in lists for t in tensors]
        return torch.linalg.vector_norm(torch.stack(norms)).float().view(1), None

    core("optimizer.clip_grads").l2_norm_impl = l2_norm


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam)


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Zero moments and a step counter for each parameter, as before a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def _optimizer_state_before_first_step() -> None:
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _is_torch_adam(self.optimizer):
            _allocate_adam_state(self.optimizer)
        return original(self)

    cls.state_dict = state_dict


def _optimizer_state_loading() -> None:
    cls = core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls._set_main_param_and_optimizer_states

    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        if not _is_torch_adam(self.optimizer):
            return original(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        # "step" is not among what is loaded per parameter, or is a placeholder there; load_state_dict sets it
        for name, state in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step" and name in tensors:
                state.copy_(tensors[name])
        return None

    cls._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


def _optimizer_step_counters() -> None:
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


def _offloaded_shards() -> None:
    cls = core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        for param in (p for group in params for p in group["params"]):
            if not param.is_leaf:
                param.retain_grad()
        original(self, params, *args, **kwargs)

    cls.__init__ = __init__


def _offloaded_main_weights() -> None:
    cls = core("optimizer.optimizer").Float16OptimizerWithFloat16Params
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer):
            optimizer._init_sub_optimizers()

    cls.__init__ = __init__


def _offloaded_copies() -> None:
    cls = core("optimizer.cpu_offloading.hybrid_optimizer").HybridDeviceOptimizer
    original = cls._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def groups(self: Any, offload_fraction: float) -> Any:
        host, device, copies, originals, fp32 = original(self, offload_fraction)
        cut = [({**g, "params": []}, {**g, "params": []}) for g in device]
        for group, (copied, kept) in zip(device, cut, strict=True):
            for param in group["params"]:
                (copied if param in originals else kept)["params"].append(param)
        host = [*host, *(copied for copied, _ in cut if copied["params"])]
        return host, [kept for _, kept in cut if kept["params"]], copies, originals, fp32

    cls._get_sub_optimizer_param_groups = groups


def _checkpoint_without_fp8() -> None:
    core("tensor_parallel.random").CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _torch_norm() -> None:
    from mtrain.mcore.layers import Norm

    def __new__(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return Norm(config, hidden_size, eps)

    core("transformer.torch_norm").WrappedTorchNorm.__new__ = staticmethod(__new__)


def _is_no_rng_remark(record: logging.LogRecord) -> bool:
    return record.getMessage() != "CPU RNG state changed within GPU RNG context"


def _rng_remark() -> None:
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_no_rng_remark)


_NO_TE: Where = "without TransformerEngine"

FIXES: tuple[Fix, ...] = (
    Fix(
        "router-gemm",
        "transformer/moe/moe_utils.py:22",
        "te_general_gemm stays unbound without TransformerEngine, and line 1192 asks for it: NameError in every MoE.",
        _NO_TE,
        _router_gemm,
    ),
    Fix(
        "mla-flag",
        "transformer/multi_latent_attention.py:62",
        "HAVE_TE says True although TELinear is a MagicMock, so isinstance at line 185 raises TypeError.",
        _NO_TE,
        _mla_flag,
    ),
    Fix(
        "mla-down-projection",
        "transformer/multi_latent_attention.py:437",
        "Down projections must be of classes known by name. The one that works without TransformerEngine splits its "
        "weight; the key position's gradient then misses other tensor-parallel ranks' heads: silent, 1e-3 relative.",
        "everywhere",
        _mla_down_projection,
    ),
    Fix(
        "mla-query-norm",
        "distributed/finalize_model_grads.py:354",
        "Gradients of every q_layernorm are summed over tensor-parallel ranks. Without sequence parallelism MLA's is "
        "whole on each rank: silently tp times too large. Now the mean is taken, which is right for equal ones.",
        "everywhere",
        _mla_query_norm,
    ),
    Fix(
        "moe-loss-tokens",
        "transformer/moe/router.py:469",
        "With a loss per token, balancing and z-losses are weighted with a rank's tokens and gradients divided by "
        "those of all: under sequence or context parallelism these losses are silently tp * cp times too small.",
        "everywhere",
        _moe_loss_tokens,
    ),
    Fix(
        "reduce-result",
        "tensor_parallel/mappings.py:31",
        "_reduce sums a contiguous copy and returns its input: silently no sum for a tensor that is not contiguous.",
        "everywhere",
        _reduce_result,
    ),
    Fix(
        "uneven-splits",
        "tensor_parallel/mappings.py:150",
        "Experts cut over tensor-parallel ranks gather tokens in pieces of different sizes, which gloo refuses: "
        "RuntimeError. Pieces are padded to the longest; a reduce-scatter of such pieces becomes an all-reduce.",
        "off CUDA",
        _uneven_splits,
    ),
    Fix(
        "gradient-norm",
        "utils.py:1205",
        "Without Apex the norm is torch.norm in fp32, on a CPU with an error of 1e-5 at a million elements "
        "and 7e-5 at four: layouts clip differently.",
        "off CUDA",
        _gradient_norm,
    ),
    Fix(
        "optimizer-state-before-first-step",
        "optimizer/distrib_optimizer.py:642",
        "state_dict() takes the step from torch Adam's state, which is empty before the first step: AssertionError.",
        _NO_TE,
        _optimizer_state_before_first_step,
    ),
    Fix(
        "optimizer-state-loading",
        "optimizer/distrib_optimizer.py:940",
        "Loading copies into every state tensor of torch Adam: KeyError 'step', or an in-place change of a leaf.",
        _NO_TE,
        _optimizer_state_loading,
    ),
    Fix(
        "optimizer-step-counters",
        "optimizer/distrib_optimizer.py:820",
        "Loading gives all parameters one step tensor; torch Adam then counts one step per parameter: silently wrong "
        "from the second step after a resume.",
        _NO_TE,
        _optimizer_step_counters,
    ),
    Fix(
        "offloaded-shards",
        "optimizer/distrib_optimizer.py:603",
        "The distributed optimizer's shards of fp32 weights are views, which the offloading optimizer does not take: "
        "ValueError about a non-leaf tensor.",
        "everywhere",
        _offloaded_shards,
    ),
    Fix(
        "offloaded-main-weights",
        "optimizer/optimizer.py:676",
        "Main weights replace 16-bit ones in an offloading optimizer that has copied those already: KeyError at the "
        "first update.",
        "everywhere",
        _offloaded_main_weights,
    ),
    Fix(
        "offloaded-copies",
        "optimizer/cpu_offloading/hybrid_optimizer.py:287",
        "A copy in host memory is known by its device; where the CPU is the device, none is, and weights that are "
        "offloaded are silently never updated.",
        "off CUDA",
        _offloaded_copies,
    ),
    Fix(
        "checkpoint-without-fp8",
        "tensor_parallel/random.py:635",
        "CheckpointWithoutOutput(fp8=False) reads as 'fp8 is on': NameError when a norm or MLP is recomputed.",
        _NO_TE,
        _checkpoint_without_fp8,
    ),
    Fix(
        "torch-norm",
        "transformer/torch_norm.py:32",
        "The norm that models take by default refuses sequence parallelism and zero-centered scales: AssertionError.",
        _NO_TE,
        _torch_norm,
    ),
    Fix(
        "rng-remark",
        "tensor_parallel/random.py:265",
        "Warns at every dropout that the CPU's random state changed, as it must where the CPU is the device.",
        "off CUDA",
        _rng_remark,
    ),
    *FSDP_FIXES,
)
"""All fixes, in the order in which they are applied."""
