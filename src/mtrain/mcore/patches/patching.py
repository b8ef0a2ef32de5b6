"""Patches of `mtrain.mcore.patches.entries`: a function each, which changes megatron-core here."""

from __future__ import annotations

import functools
import importlib
import logging
from contextlib import nullcontext
from typing import Any

import torch
from packaging.version import Version

from mtrain.config.engine import release
from mtrain.mcore.adapter.installed import installed


def _core(module: str) -> Any:
    return importlib.import_module(f"megatron.core.{module}")


def router_gemm() -> None:
    """Say that there is no GEMM of TransformerEngine."""
    _core("transformer.moe.moe_utils").te_general_gemm = None


def mla_flag() -> None:
    """Say that there is no TransformerEngine."""
    _core("transformer.multi_latent_attention").HAVE_TE = False


def mla_down_projection() -> None:
    """Let the portable projection, whose weight is whole on every rank, stand beside the one that
    is named.
    """
    from mtrain.mcore.layers.portable import DuplicatedLinear

    module = _core("transformer.multi_latent_attention")
    module.Linear = _AnyOf((module.Linear, DuplicatedLinear))


class _AnyOf:
    """Equal to each of several classes and what is derived of them: megatron-core looks a class up
    in a list.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.kinds = kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type) and any(
            issubclass(other, kind) for kind in self.kinds if kind is not None
        )


def mla_query_projection() -> None:
    """Take the projection of queries that a spec names."""
    cls = _core("transformer.mla_qk_norm_config").QKNormConfigResolver
    original = cls._mla_fused_linear_or_default

    @functools.wraps(original)
    def projection(self: Any, module_spec: Any, module_name: str) -> Any:
        if module_name == "linear_q_proj":
            return module_spec
        return original(self, module_spec, module_name)

    cls._mla_fused_linear_or_default = projection


def mla_query_norm() -> None:
    """Mark the query norm for a mean over tensor-parallel ranks where the sum would be wrong."""
    cls = _core("transformer.multi_latent_attention").MLASelfAttention
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    cls.__init__ = __init__


def reduce_result() -> None:
    """Return the tensor that was summed."""

    def _reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
        if group.size() > 1:
            input_ = input_.contiguous()
            torch.distributed.all_reduce(input_, group=group)
        return input_

    _core("tensor_parallel.mappings")._reduce = _reduce


def moe_loss_tokens() -> None:
    """Weigh balancing and z-losses with the tokens of all ranks that share them, and what a step is
    divided by.
    """
    cls = _core("transformer.moe.router").TopKRouter
    attach = cls.attach_and_log_load_balancing_loss
    z_loss = cls.apply_z_loss
    # tokens of tensor- and context-parallel ranks are counted already
    counted = release.at_least(0, 19)

    from mtrain.mcore.layers.balance import ROUTER_LOSS_SHARE

    def tokens_of(router: Any, group: Any) -> Any:
        share = getattr(router.config, ROUTER_LOSS_SHARE, 1.0)
        return group.size() * share / (router.tp_cp_group.size() if counted else 1)

    @functools.wraps(attach)
    def attach_whole(
        self: Any,
        activation: Any,
        coeff: Any,
        loss: Any,
        name: str,
        group: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if self.calculate_per_token_loss:
            local = kw.get("valid_token_count")
            kw["valid_token_count"] = (activation.shape[0] if local is None else local) * tokens_of(
                self, group
            )
        return attach(self, activation, coeff, loss, name, group, *args, **kw)

    @functools.wraps(z_loss)
    def apply_z_loss(self: Any, logits: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if not self.calculate_per_token_loss or self.config.moe_z_loss_coeff is None:
            return z_loss(self, logits, *args, **kw)
        coefficient = self.config.moe_z_loss_coeff
        group = self.tp_cp_group
        self.config.moe_z_loss_coeff = coefficient * tokens_of(self, group)
        try:
            return z_loss(self, logits, *args, **kw)
        finally:
            self.config.moe_z_loss_coeff = coefficient

    cls.attach_and_log_load_balancing_loss = attach_whole
    cls.apply_z_loss = apply_z_loss


def sequence_loss_batch() -> None:
    """Count the tokens of all sequences of a micro-batch; none is padded."""
    cls = _core("transformer.moe.router").TopKRouter
    attach = cls.attach_and_log_load_balancing_loss

    @functools.wraps(attach)
    def attach_whole(
        self: Any, activation: Any, coeff: Any, loss: Any, name: str, *args: Any, **kw: Any
    ) -> Any:
        if name == "seq_load_balancing_loss":
            kw["valid_token_count"] = activation.shape[0]
        return attach(self, activation, coeff, loss, name, *args, **kw)

    cls.attach_and_log_load_balancing_loss = attach_whole


def routed_padding() -> None:
    """Route the tokens that are there; padding counts nowhere and takes no capacity."""
    from mtrain.mcore.layers.router import routing_of_tokens, tokens_of

    cls = _core("transformer.moe.router").TopKRouter
    original = cls.routing

    @functools.wraps(original)
    def routing(
        self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, **more: Any
    ) -> Any:
        tokens = tokens_of(self, logits, padding_mask)
        if tokens is None:
            return original(self, logits, **more)
        return routing_of_tokens(self, logits, tokens)

    cls.routing = routing


def expert_gradients() -> None:
    """Mark experts that are sharded otherwise than dense weights as what they are."""
    cls = _core("transformer.moe.moe_layer").MoELayer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for parameter in self.experts.parameters():
                parameter.allreduce = False

    cls.__init__ = __init__


def mtp_tied_output() -> None:
    """Take the unused weight out of a tied output layer."""
    cls = _core("models.gpt.gpt_model").GPTModel
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.share_embeddings_and_output_weights and self.mtp_process and self.post_process:
            self.output_layer.weight = None

    cls.__init__ = __init__


def mtp_without_labels() -> None:
    """Leave MTP layers out where there are no labels."""
    cls = _core("models.gpt.gpt_model").GPTModel
    original = cls._postprocess

    @functools.wraps(original)
    def _postprocess(self: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        predictions = self.config.mtp_num_layers
        if labels is not None or not predictions:
            return original(self, *args, labels=labels, **kwargs)
        self.config.mtp_num_layers = None
        try:
            return original(self, *args, labels=None, **{**kwargs, "mtp_in_postprocess": False})
        finally:
            self.config.mtp_num_layers = predictions

    cls._postprocess = _postprocess


def mtp_names() -> None:
    """Hold the layer under the name that it had."""
    cls = _core("transformer.multi_token_prediction").MultiTokenPredictionLayer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        parts = {
            name.replace("mtp_model_layer", "transformer_layer"): part
            for name, part in self._modules.items()
        }
        # and filled in the same order, which is that of weights in a checkpoint's buffers
        self._modules.clear()
        self._modules.update(parts)

    cls.__init__ = __init__
    cls.mtp_model_layer = property(lambda self: self.transformer_layer)


def uneven_splits() -> None:
    """Gather and scatter pieces of different sizes with collectives that gloo has."""
    mappings = _core("tensor_parallel.mappings")
    dist = torch.distributed
    gather = mappings._gather_along_first_dim
    scatter = mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kw: Any
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kw)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(*sizes, 1), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter)
    def scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kw: Any
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *args, **kw)
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven


def gathered_pieces() -> None:
    """Gather what is not one-dimensional as its elements in a row, which is what is returned in any
    case.
    """
    utils = _core("tensor_parallel.utils")
    parallel = _core("tensor_parallel")
    original = utils.gather_split_1d_tensor

    @functools.wraps(original)
    def gather(tensor: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
        whole: torch.Tensor = original(tensor.reshape(-1), tp_group)
        return whole

    for module in (utils, parallel, _core("tensor_parallel.random")):
        module.gather_split_1d_tensor = gather


def host_weights() -> None:
    """Draw them as a host does that has a generator of its own; a device that is no CPU has one."""
    layers = _core("tensor_parallel.layers")
    original = layers._initialize_affine_weight_cpu

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with getattr(getattr(installed.device, "namespace", None), "host_random", nullcontext)():
            return original(*args, **kwargs)

    for module in (layers, _core("transformer.moe.experts")):
        if hasattr(module, original.__name__):
            setattr(module, original.__name__, initialize)


def gradient_norm() -> None:
    """Add squares up in fp32 over a few thousand elements, and these sums in fp64; ask the device
    for no number.
    """

    def l2_norm(
        chunk_size: int, flag: Any, lists: list[list[torch.Tensor]], per_tensor: bool, *_: Any
    ) -> Any:
        return norm_of_all([t for tensors in lists for t in tensors]).view(1), None

    _core("optimizer.clip_grads").l2_norm_impl = l2_norm


def norm_of_all(tensors: list[torch.Tensor], *, in_rows: bool | None = None) -> torch.Tensor:
    """Return the norm of tensors as one vector: fp32 [], on the device of the first.

    `in_rows` by default on a CPU, whose norms of many elements are inexact; a GPU adds up as a
    tree, and takes many tensors in one launch.
    """
    device = tensors[0].device  # an update in host memory has some of each
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
    """Zero moments and a step counter for each parameter, as before a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def optimizer_state_before_first_step() -> None:
    """Make Adam's state before it is asked for."""
    cls = _core("optimizer.distrib_optimizer").DistributedOptimizer
    original = cls.state_dict

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _is_torch_adam(self.optimizer):
            _allocate_adam_state(self.optimizer)
        return original(self)

    cls.state_dict = state_dict


def optimizer_state_loading() -> None:
    """Copy what was saved into the moments and the main weight alone."""
    cls = _core("optimizer.distrib_optimizer").DistributedOptimizer
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
        # "step" is not among what is loaded per parameter, or is a placeholder there;
        # load_state_dict sets it
        for name, state in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step" and name in tensors:
                state.copy_(tensors[name])
        return None

    cls._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


def optimizer_step_counters() -> None:
    """Give each parameter a step counter of its own."""
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


def te_version() -> None:
    """Say that it is older than any."""
    _core("utils").get_te_version = lambda: Version("0")


def torch_norm() -> None:
    """Let the portable norm stand for the one that models take by default."""
    from mtrain.mcore.layers.portable import Norm

    def __new__(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return Norm(config, hidden_size, eps)

    _core("transformer.torch_norm").WrappedTorchNorm.__new__ = staticmethod(__new__)


def _is_no_rng_remark(record: logging.LogRecord) -> bool:
    return record.getMessage() != "CPU RNG state changed within GPU RNG context"


def rng_remark() -> None:
    """Keep the remark out of the log."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_no_rng_remark)
