"""The router of experts as megatron-core's, which says for each token its experts, and never a map of all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter
from mtrain_kernels.moe_router.op import moe_router
from torch import Tensor

LEARNS = "learns"
"""Of a tensor of experts, whether a router in training chose them. Under a checkpoint autograd does not say so."""


class Sparse(NamedTuple):
    """How a model routes by lists of experts: `config.sparse_experts`; a config without it routes by maps."""

    router: str
    """The implementation of the choice, `triton` or `reference`."""
    permute: str
    """That of the permutation of tokens."""
    group_members: int | None = None
    """How many of its best scores a group of experts is worth; None: there are no groups."""
    padded: bool = False
    """Whether expert-parallel ranks send each other as many rows in every step."""
    capacity_factor: float | None = None
    """How many those are in training, over the even share; None: the most that there can be."""
    one_graph: bool = False
    """Whether schedules are captured whole, those of evaluations too: their shapes have to stay."""


class Choices:
    """The experts [t, k] of tokens, where megatron-core's losses expect a map [t, e] that is true at them."""

    def __init__(self, indices: Tensor, experts: int) -> None:
        self.indices, self.shape = indices, (indices.shape[0], experts)

    def sum(self, dim: int = 0) -> Tensor:
        """How often each expert was chosen, int64 [e]; nothing waits for the device, as `bincount` would."""
        if dim != 0:
            raise ValueError("choices are counted over tokens")
        flat = self.indices.reshape(-1)
        return flat.new_zeros(self.shape[1]).scatter_add_(0, flat, torch.ones_like(flat))

    def reshape(self, rows: int, _: int) -> Choices:
        """Those of `rows` positions, each with all samples of a micro-batch beside each other."""
        samples = self.shape[0] // rows
        sample = torch.arange(self.shape[0], device=self.indices.device) % samples
        own = self.indices + (sample * self.shape[1])[:, None]
        return Choices(own.view(rows, -1), samples * self.shape[1])


class SparseRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, whose results are weights [t, k] and the experts [t, k] that they belong to."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [t, k] and experts [t, k], int64, of `logits` [s, b, e]; losses of balance ride along."""
        if padding_mask is not None:
            raise ValueError("tokens that are padded are routed by maps alone")
        config, positions = self.config, logits.shape[0]
        logits = self.apply_z_loss(logits.reshape(-1, config.num_moe_experts))
        groups: dict[str, Any] = {}
        if config.moe_router_group_topk:
            groups = {"groups": config.moe_router_num_groups, "group_topk": config.moe_router_group_topk}
            groups["group_members"] = config.sparse_experts.group_members
        bias = self.expert_bias if self.score_function == "sigmoid" else None
        weights, experts, counts = moe_router(
            logits,
            self.topk,
            score=self.score_function,
            pre_softmax=config.moe_router_pre_softmax,
            scale=config.moe_router_topk_scaling_factor or 1.0,
            expert_bias=bias,
            impl=config.sparse_experts.router,
            **groups,
        )
        setattr(experts, LEARNS, self.training)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            weights = self._balanced(weights, logits, None if groups or bias is not None else experts, positions)
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += counts
        return weights, experts

    def _balanced(self, weights: Tensor, logits: Tensor, experts: Tensor | None, positions: int) -> Tensor:
        """The weights with the balancing losses, for which groups and bias do not choose."""
        if self.score_function == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = torch.sigmoid(logits)
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        chosen = scores.detach().topk(self.topk, dim=1).indices if experts is None else experts
        choices = Choices(chosen, logits.shape[1])
        weights = self._apply_aux_loss(weights, scores, choices)
        samples = logits.shape[0] // positions
        return self._apply_seq_aux_loss(weights, scores, choices, positions, samples)  # type: ignore[no-any-return]
