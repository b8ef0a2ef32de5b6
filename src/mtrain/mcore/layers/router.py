"""The router of experts as megatron-core's, which says for each token its experts, and never a map
of all of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from mtrain_kernels.moe_router.op import moe_router
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.mcore.layers.balance import (
    counts_of,
    with_balancing_losses,
    with_z_loss,
    within_capacity,
)
from mtrain.mcore.layers.linear import add_in_place, adds_to_main_grad
from mtrain.mcore.layers.padding import padding_of
from mtrain.mcore.layers.routes import active, replaced

LEARNS = "learns"
"""Attribute of a tensor of experts: did a router in training choose them?

Under a checkpoint autograd does not say so.
"""


class Sparse(NamedTuple):
    """Settings of routing by lists of experts: `config.sparse_experts`; a config without it routes
    by maps.
    """

    router: str
    """The implementation of the choice, `triton` or `reference`."""
    permute: str
    """The implementation of the permutation of tokens."""
    group_members: int | None = None
    """Number of a group's best scores that add up to its own score; None: there are no groups."""
    padded: bool = False
    """True if expert-parallel ranks exchange the same number of rows in every step."""
    capacity_factor: float | None = None
    """Rows so exchanged in training, relative to an even share; None: the most that can occur."""
    one_graph: bool = False
    """True if whole schedules are captured, those of evaluations too: their shapes must not change.
    """


class SparseRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, whose results are weights [t, k] and the experts [t, k] that they
    belong to.
    """

    def gating(self, input: Tensor) -> Tensor:  # the name is megatron-core's
        """Return the logits [s, b, e] of `input` [s, b, h] in `moe_router_dtype`, or in its own."""
        config = self.config
        fuses = (
            config.gradient_accumulation_fusion
            and torch.is_grad_enabled()
            and self.weight.requires_grad
            and self.bias is None
            and adds_to_main_grad(self.weight)
        )
        if not fuses:
            return super().gating(input)  # type: ignore[no-any-return]
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(config.moe_router_dtype)
        return _Gating.apply(input, self.weight, dtype or input.dtype)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [t, k] and experts [t, k], int64, of `logits` [s, b, e]; losses of balance
        ride along.

        Padding has weights of 0 and -1 in place of experts.
        """
        config = self.config
        positions = logits.shape[0]
        tokens = tokens_of(self, logits, padding_mask)
        logits = logits.reshape(-1, config.num_moe_experts)
        there = tokens if tokens is not None else logits.new_ones(logits.shape[0], dtype=torch.bool)
        logits = with_z_loss(self, logits, there)
        groups: dict[str, Any] = {}
        if config.moe_router_group_topk:
            groups = {
                "groups": config.moe_router_num_groups,
                "group_topk": config.moe_router_group_topk,
            }
            # megatron-core takes topk // group_topk: right for DeepSeek-V3, wrong for DeepSeek-V2.
            groups["group_members"] = config.sparse_experts.group_members
        # megatron-core's routing ignores the bias with softmax scores.
        bias = self.expert_bias if self.score_function == "sigmoid" else None
        routed = functools.partial(
            moe_router,
            logits,
            self.topk,
            score=self.score_function,
            pre_softmax=config.moe_router_pre_softmax,
            scale=config.moe_router_topk_scaling_factor or 1.0,
            expert_bias=bias,
            impl=config.sparse_experts.router,
            **groups,
        )
        weights, experts, counts = routed()
        # The losses count the experts with the best scores, which groups and biases may not choose.
        by_scores = None if groups or bias is not None else experts
        recorded = replaced(self, experts, positions)
        if recorded is not None:
            weights, experts, counts = routed(experts=recorded)
        weights = with_balancing_losses(self, weights, logits, there, positions, by_scores)
        if tokens is not None:
            counts = counts_of(experts, tokens, config.num_moe_experts)
            weights = weights * tokens[:, None]
            # The plan of a permutation gives no row to an expert of -1.
            experts = experts.masked_fill(~tokens[:, None], -1)
        setattr(experts, LEARNS, self.training)
        count_choices(self, counts)
        return weights, experts


class _Gating(torch.autograd.Function):
    """The product of megatron-core's `RouterGatingLinearFunction`, which adds the gradient of the
    weight to its buffer unrounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        logits = torch.mm(x.view(-1, x.shape[-1]).to(dtype), weight.to(dtype).t())
        return logits.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = dlogits.reshape(-1, dlogits.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(rows, weight.to(ctx.dtype)).to(x.dtype).view(x.shape)
        return dx, add_in_place(weight, rows, x.view(-1, x.shape[-1]).to(ctx.dtype)), None


def tokens_of(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor | None:
    """Return a mask of the positions of `logits` [s, b, e] that are tokens: bool [s * b]; None: all
    are.

    `padding_mask` [s, b] is megatron-core's; if it passes none, the micro-batch's own padding is
    used.
    """
    padding = padding_of(logits.shape[0], router.tp_group) if padding_mask is None else padding_mask
    return None if padding is None else ~padding.reshape(-1)


def count_choices(router: Any, counts: Tensor) -> None:
    """Add the number of tokens that chose each expert to the counts that move its bias; not in an
    evaluation or a recomputation.
    """
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            router.local_tokens_per_expert += counts


def routing_of_tokens(router: Any, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `TopKRouter.routing` for `logits` [s, b, e] some of whose positions are padding, with
    weights of 0.

    `tokens` [s * b] says which are not. The results are weights and a map, both [s * b, e]. Where
    experts have a capacity, padding goes to none; else it goes to all in turn, for dispatchers take
    each position to have as many.
    """
    config = router.config
    positions = logits.shape[0]
    logits = with_z_loss(router, logits.reshape(-1, config.num_moe_experts), tokens)
    if router.routing_type == "sinkhorn":
        weights, chosen = _by_sinkhorn(router, logits, tokens)
    else:
        weights, chosen = topk_routing_with_score_function(
            logits,
            router.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=router.score_function,
            expert_bias=router.expert_bias,
            fused=config.moe_router_fusion,
            router_replay=router.router_replay,
        )
        weights, chosen = _with_recorded(router, weights, chosen, logits, positions)
        # A capacity would otherwise be shared with padding.
        chosen = chosen & tokens[:, None]
        weights = weights * tokens[:, None]
    if config.moe_expert_capacity_factor is None:
        taken = chosen | (_in_turn(chosen, router.topk) & ~tokens[:, None])
    else:
        weights, taken = within_capacity(router, weights, chosen, tokens)
    weights = with_balancing_losses(router, weights, logits, tokens, positions)
    count_choices(router, (taken & tokens[:, None]).sum(dim=0))
    return weights, taken


def _with_recorded(
    router: Any, weights: Tensor, chosen: Tensor, logits: Tensor, positions: int
) -> tuple[Tensor, Tensor]:
    """Return weights and map [t, e] of recorded experts, where a router chose others."""
    if not active(router):
        return weights, chosen
    # A stable sort: of equal numbers, topk takes any.
    order = chosen.byte().sort(dim=1, descending=True, stable=True).indices
    recorded = replaced(router, order[:, : router.topk], positions)
    if recorded is None:
        return weights, chosen
    config = router.config
    values, _, _ = moe_router(
        logits,
        router.topk,
        score=router.score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scale=config.moe_router_topk_scaling_factor or 1.0,
        experts=recorded,
        impl="reference",
    )
    taken = torch.zeros_like(chosen).scatter(1, recorded, True)
    return torch.zeros_like(logits).scatter(1, recorded, values), taken


def _in_turn(like: Tensor, topk: int) -> Tensor:
    """Return a map in the shape of `like` [t, e] in which every position has the next `topk`
    experts.
    """
    copies = torch.arange(like.shape[0] * topk, device=like.device) % like.shape[1]
    return torch.zeros_like(like).scatter_(1, copies.view(-1, topk), value=True)


def _by_sinkhorn(router: Any, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and map [t, e] of real tokens only: the balance is theirs."""
    weights = torch.zeros_like(logits)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    # The host waits here, as it does in the loop of sinkhorn itself.
    rows = tokens.nonzero().flatten()
    if len(rows) == 0:
        return weights, chosen
    own, map_of_own = router.sinkhorn_load_balancing(logits.index_select(0, rows))
    return weights.index_copy(0, rows, own), chosen.index_copy(0, rows, map_of_own)
