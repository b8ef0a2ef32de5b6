"""Defects of megatron-core 0.16.1 that configuration cannot avoid, each mended once when the door is opened.

Each has a test in `tests/dist/test_door_fixes.py` that fails without it. At an upgrade of megatron-core every
entry is to be looked up again: the reason says what to look for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mtrain.devices.base import Device

Where = Literal["everywhere", "without TransformerEngine", "off CUDA"]


@dataclass(frozen=True, slots=True)
class Fix:
    """One mended defect."""

    name: str
    """What tests and messages call it."""
    where: str
    """File under megatron/core and line in 0.16.1."""
    reason: str
    """What is wrong, and what happens without the fix."""
    applies: Where
    """Where it is needed."""
    apply: Callable[[], None]
    """Mends it in this process."""


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


def _core(module: str) -> Any:
    return importlib.import_module(f"megatron.core.{module}")


def _router_gemm() -> None:
    _core("transformer.moe.moe_utils").te_general_gemm = None


def _mla_flag() -> None:
    _core("transformer.multi_latent_attention").HAVE_TE = False


def _mla_down_projection() -> None:
    from mtrain.mcore.layers import DuplicatedLinear

    _core("transformer.multi_latent_attention").Linear = DuplicatedLinear


def _mla_query_norm() -> None:
    cls = _core("transformer.multi_latent_attention").MLASelfAttention
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

    _core("tensor_parallel.mappings")._reduce = _reduce


def _moe_loss_tokens() -> None:
    router, moe = _core("transformer.moe.router"), _core("transformer.moe.moe_utils")
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
    mappings, dist = _core("tensor_parallel.mappings"), torch.distributed
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

    _core("optimizer.clip_grads").l2_norm_impl = l2_norm


def _norm_groups() -> None:
    from torch.distributed.tensor import DTensor

    def group_of(tensor: torch.Tensor, known: Any = None) -> Any:
        if not isinstance(tensor, DTensor):
            return None
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        ranks = torch.distributed.get_process_group_ranks
        assert known is None or ranks(known) == ranks(group), "gradients of one norm are spread over different ranks"
        return group

    _core("optimizer.clip_grads").get_data_parallel_group_if_dtensor = group_of


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
    cls = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _is_torch_adam(self.optimizer):
            _allocate_adam_state(self.optimizer)
        return original(self)

    cls.state_dict = state_dict


def _optimizer_state_loading() -> None:
    cls = _core("optimizer.distrib_optimizer").DistributedOptimizer
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
    cls = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        if _is_torch_adam(self.optimizer):
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()

    cls.load_state_dict = load_state_dict


def _checkpoint_without_fp8() -> None:
    _core("tensor_parallel.random").CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _fsdp_finish_grad_sync() -> None:
    cls = _core("distributed.torch_fully_sharded_data_parallel").TorchFullyShardedDataParallel

    def finish_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        """Nothing: torch's FSDP2 has reduced the gradients when the backward pass ends."""

    cls.finish_grad_sync = finish_grad_sync


def _fsdp_te_linear() -> None:
    _core("distributed.fsdp.mcore_fsdp_adapter").TELinear = ()


def _fsdp_optim_replicas() -> None:
    cls = _core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer").ParamAndGradBuffer
    original = cls.reduce_scatter_gradients

    @functools.wraps(original)
    def reduce_scatter_gradients(self: Any, async_op: bool = True) -> None:
        original(self, async_op)
        if self.dist_index.use_hybrid_fsdp:
            for group in self.parameter_groups:
                if group.main_grad_buffer is not None:
                    own = group.main_grad_buffer.get_shard_from_local_buffer()
                    torch.distributed.all_reduce(own, group=self.dist_index.get_outer_fsdp_group())

    cls.reduce_scatter_gradients = reduce_scatter_gradients


def _fsdp_lone_rank() -> None:
    cls = _core("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer").GradReducePipeline
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
                torch.distributed.all_reduce(buffer.data, group=self.buffer.dist_index.get_outer_fsdp_group())
            self.bucket_grad_ready_params[bucket] = set()
        return True

    cls._bucket_group_gradient_reduce = reduce


def _fsdp_meshes() -> None:
    module = _core("distributed.fsdp.mcore_fsdp_adapter")

    def mesh(*groups: Any) -> torch.Tensor:
        here, found = torch.distributed.get_rank(), torch.tensor([0])
        for group in groups:
            steps = torch.tensor(torch.distributed.get_process_group_ranks(group)) - here
            found = found[..., None] + steps
        return found[0] + here

    module._get_dp_tp_mesh = lambda dp, tp, ep_size=1: mesh(dp, tp)
    module._get_hsdp_tp_mesh = mesh


def _fsdp_tied_stages() -> None:
    module = _core("distributed.finalize_model_grads")
    original, unwrap = module._allreduce_embedding_grad, module.get_attr_wrapped_model

    @functools.wraps(original)
    def reduce(model: list[Any], embd_group: Any, pp_group: Any, weight_getter: Any, *args: Any, **kw: Any) -> None:
        if not model[0].ddp_config.use_megatron_fsdp:
            original(model, embd_group, pp_group, weight_getter, *args, **kw)
        elif embd_group is not None and embd_group.size() > 1:
            weights = [weight_getter(unwrap(chunk, "pre_process", return_model_obj=True)) for chunk in model]
            for weight in weights:
                if weight is not None and weight.grad is not None:
                    torch.distributed.all_reduce(weight.grad._local_tensor, group=embd_group)

    module._allreduce_embedding_grad = reduce


def _torch_norm() -> None:
    from mtrain.mcore.layers import Norm

    def __new__(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return Norm(config, hidden_size, eps)

    _core("transformer.torch_norm").WrappedTorchNorm.__new__ = staticmethod(__new__)


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
        "norm-groups",
        "utils.py:1074",
        "Asks the mesh of a gradient for its one group: RuntimeError where it has two dimensions (replicas in FSDP2). "
        "And takes two groups of the same ranks (dense, expert) for different ones: AssertionError.",
        "everywhere",
        _norm_groups,
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
        "checkpoint-without-fp8",
        "tensor_parallel/random.py:635",
        "CheckpointWithoutOutput(fp8=False) reads as 'fp8 is on': NameError when a norm or MLP is recomputed.",
        _NO_TE,
        _checkpoint_without_fp8,
    ),
    Fix(
        "fsdp-finish-grad-sync",
        "distributed/data_parallel_base.py:49",
        "torch FSDP's wrapper inherits finish_grad_sync without the argument of finalize_model_grads: TypeError.",
        "everywhere",
        _fsdp_finish_grad_sync,
    ),
    Fix(
        "fsdp-te-linear",
        "distributed/fsdp/mcore_fsdp_adapter.py:184",
        "Without TransformerEngine TELinear is a MagicMock: isinstance raises TypeError under tensor parallelism.",
        _NO_TE,
        _fsdp_te_linear,
    ),
    Fix(
        "fsdp-optim-replicas",
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:2906",
        "With only optimizer state spread (optim), gradients are reduced within a replica and never between them: "
        "each silently trains on samples of its own.",
        "everywhere",
        _fsdp_optim_replicas,
    ),
    Fix(
        "fsdp-lone-rank",
        "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3263",
        "In a group of one rank (ep = dp) the reduced gradient is added to itself: silently doubled, and those of "
        "earlier micro-batches again at each later one.",
        "everywhere",
        _fsdp_lone_rank,
    ),
    Fix(
        "fsdp-meshes",
        "distributed/fsdp/mcore_fsdp_adapter.py:369",
        "Takes the data- and tensor-parallel ranks for the whole world: EinopsError with pipeline stages.",
        "everywhere",
        _fsdp_meshes,
    ),
    Fix(
        "fsdp-tied-stages",
        "distributed/finalize_model_grads.py:259",
        "With megatron-core's FSDP the gradient of an embedding that two stages hold is set to this rank's part of it: "
        "RuntimeError about its size. The sum in place is all that is needed.",
        "everywhere",
        _fsdp_tied_stages,
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
)
"""All fixes, in the order in which they are applied."""
