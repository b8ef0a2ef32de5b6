"""Patches of routers, their losses, and the gradients of experts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mtrain.config.engine import release
from mtrain.config.engine.release import UNTIL_0_16
from mtrain.mcore.patches.patch import NO_TE, core, patch


@patch(
    "router-gemm",
    "transformer/moe/moe_utils.py:22",
    "te_general_gemm stays unbound without TransformerEngine, and line 1192 asks for it:"
    " NameError in every MoE.",
    NO_TE,
    UNTIL_0_16,
)
def router_gemm() -> None:
    """Say that there is no GEMM of TransformerEngine."""
    core("transformer.moe.moe_utils").te_general_gemm = None


@patch(
    "moe-loss-tokens",
    "transformer/moe/router.py:469",
    "With a loss per token, balancing and z-losses are weighted with a rank's tokens and"
    " gradients divided by those of all: under sequence or context parallelism these losses are"
    " silently tp * cp times too small. Since 0.19 (#5047) they are not, but for the loss over"
    " data-parallel ranks and for tokens that are not learned from.",
    "everywhere",
    upstream="#5047",
)
def moe_loss_tokens() -> None:
    """Weigh balancing and z-losses with the tokens of all ranks that share them, and with the
    divisor of a step.
    """
    cls = core("transformer.moe.router").TopKRouter
    attach = cls.attach_and_log_load_balancing_loss
    z_loss = cls.apply_z_loss
    # 0.19 counts the tokens of tensor- and context-parallel ranks itself.
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
        # megatron-core multiplies with this rank's tokens inside; only the coefficient is within
        # reach.
        self.config.moe_z_loss_coeff = coefficient * tokens_of(self, group)
        try:
            return z_loss(self, logits, *args, **kw)
        finally:
            self.config.moe_z_loss_coeff = coefficient

    cls.attach_and_log_load_balancing_loss = attach_whole
    cls.apply_z_loss = apply_z_loss


@patch(
    "sequence-loss-batch",
    "transformer/moe/router.py:366",
    "With a loss per token, the balancing loss of sequences is weighted with the tokens of one"
    " of them: silently as many times too small as a micro-batch has samples.",
    "everywhere",
    UNTIL_0_16,
    "#5798",
)
def sequence_loss_batch() -> None:
    """Count the tokens of all sequences of a micro-batch; none is padded."""
    cls = core("transformer.moe.router").TopKRouter
    attach = cls.attach_and_log_load_balancing_loss

    @functools.wraps(attach)
    def attach_whole(
        self: Any, activation: Any, coeff: Any, loss: Any, name: str, *args: Any, **kw: Any
    ) -> Any:
        if name == "seq_load_balancing_loss":
            kw["valid_token_count"] = activation.shape[0]
        return attach(self, activation, coeff, loss, name, *args, **kw)

    cls.attach_and_log_load_balancing_loss = attach_whole


@patch(
    "routed-padding",
    "transformer/moe/router.py:542",
    "Padding is routed, fills capacities and counts in losses and biases unless a mask is"
    " handed over, which MTP layers and pipeline stages in between lack; and with one the"
    " losses of several ranks are weighted wrongly.",
    "everywhere",
    upstream="#6114",
)
def routed_padding() -> None:
    """Route real tokens; padding counts nowhere and takes no capacity. Experts that were recorded
    for tokens replace those that are chosen, as in `SparseRouter`.
    """
    from mtrain.mcore.layers.router import routing_of_tokens, tokens_of
    from mtrain.mcore.layers.routes import active

    cls = core("transformer.moe.router").TopKRouter
    original = cls.routing

    @functools.wraps(original)
    def routing(
        self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, **more: Any
    ) -> Any:
        tokens = tokens_of(self, logits, padding_mask)
        if tokens is None:
            if not active(self):
                return original(self, logits, **more)
            tokens = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device).flatten()
        return routing_of_tokens(self, logits, tokens)

    cls.routing = routing


@patch(
    "expert-gradients",
    "tensor_parallel/layers.py:842",
    "Without expert parallelism, experts count as dense weights. If those are sharded otherwise"
    " (etp is not tp) their gradients are summed over the wrong ranks: silently half of a"
    " gradient with tp 2 and etp 1.",
    "everywhere",
    UNTIL_0_16,
)
def expert_gradients() -> None:
    """Mark the weights of experts that are sharded otherwise than dense weights."""
    cls = core("transformer.moe.moe_layer").MoELayer
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for parameter in self.experts.parameters():
                parameter.allreduce = False

    cls.__init__ = __init__


@patch(
    "expert-norm",
    "tensor_parallel/layers.py:96",
    "What experts hold whole (biases behind them) counts in the gradient norm on the first"
    " tensor-parallel rank only. Where others hold other experts (ep with tp) theirs"
    " silently do not count.",
    "everywhere",
    UNTIL_0_16,
    "#5916",
)
def expert_norm() -> None:
    """Count an expert's replicated weights once for each group that shares the expert, in main
    weights too.
    """
    package = core("tensor_parallel")
    layers = core("tensor_parallel.layers")
    asked = layers.param_is_not_tensor_parallel_duplicate
    copied = layers.copy_tensor_model_parallel_attributes

    @functools.wraps(asked)
    def is_no_duplicate(param: Any, tp_group: Any = None) -> bool:
        expert = not getattr(param, "allreduce", True)
        return bool(
            asked(
                param,
                core("parallel_state").get_expert_tensor_parallel_group() if expert else tp_group,
            )
        )

    @functools.wraps(copied)
    def copy_attributes(destination: Any, source: Any) -> None:
        copied(destination, source)
        if hasattr(source, "allreduce"):
            destination.allreduce = source.allreduce

    # Each of these modules has a reference of its own.
    for module in (package, layers, core("optimizer.clip_grads")):
        module.param_is_not_tensor_parallel_duplicate = is_no_duplicate
    for module in (package, layers):
        module.copy_tensor_model_parallel_attributes = copy_attributes
