"""Token counts of routers and their losses, over real tokens only: padding takes no part.

A step is divided once by its predictions (or samples), so a loss here is a sum over tokens: that of
a micro-batch times its tokens. With `ROUTER_LOSS_SHARE` it ends as the average over all tokens of
the step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_capacity
from torch import Tensor

ROUTER_LOSS_SHARE = "router_loss_share"
"""Attribute of a TransformerConfig: the divisor of the step as a share of the tokens that routers
see; 1 (all of them) if unset.
"""
PER_SAMPLE = "seq_aux_loss"
"""The balancing loss over each sample by itself."""


def counts_of(experts: Tensor, tokens: Tensor, number: int) -> Tensor:
    """Return how many of the `tokens` [t], bool, chose each of `number` experts, int64 [number];
    `experts` is [t, k].

    Nothing waits for the device, as `bincount` would.
    """
    flat = experts.reshape(-1)
    each = tokens.to(torch.int64).repeat_interleave(experts.shape[1], output_size=flat.shape[0])
    return each.new_zeros(number).scatter_add_(0, flat, each)


def with_z_loss(router: Any, logits: Tensor, tokens: Tensor) -> Tensor:
    """Return `logits` [t, e] whose backward adds the z-loss over the true ones of `tokens` [t]."""
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not router.training or not torch.is_grad_enabled():
        return logits
    squares = torch.logsumexp(logits, dim=-1).square() * tokens
    return _attached(router, logits, coefficient * squares.sum())


def with_balancing_losses(
    router: Any,
    weights: Tensor,
    logits: Tensor,
    tokens: Tensor,
    positions: int,
    experts: Tensor | None = None,
) -> Tensor:
    """Return `weights`, whose backward adds the balancing losses of `logits` [t, e] over the
    `tokens` [t] that are true.

    t are `positions` with the samples of the micro-batch next to each other. The experts that count
    are those with the best scores, which may be given as `experts` [t, k].
    """
    if not (router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled()):
        return weights
    for kind, parts in (("aux_loss", 1), (PER_SAMPLE, logits.shape[0] // positions)):
        coefficient = router.get_aux_loss_coeff(kind)
        if coefficient > 0:
            loss = coefficient * imbalance(router, logits, tokens, parts, experts)
            weights = _attached(router, weights, loss)
    return weights


def _scores(logits: Tensor, kind: str) -> Tensor:
    """Return scores [t, e] that add up to 1 for each token."""
    if kind == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def imbalance(
    router: Any, logits: Tensor, tokens: Tensor, parts: int, experts: Tensor | None = None
) -> Tensor:
    """Return the sum over parts of a micro-batch of E sum_i f_i P_i times the tokens of the part;
    token t is of t % parts.

    Tensor- and context-parallel ranks have other tokens of the same parts: f is over all of them,
    and each rank gives its own tokens' part of P. The experts [t, k] that count are by default
    those with the best scores.
    """
    scores = _scores(logits, router.score_function)
    # Groups and biases change which experts a token goes to. The losses count those with the best
    # scores, as megatron-core's do.
    chosen = scores.detach().topk(router.topk, dim=1).indices if experts is None else experts
    number = scores.shape[1]
    topk = chosen.shape[1]
    part = torch.arange(scores.shape[0], device=scores.device) % parts
    # One histogram for all parts, in which each part has `number` bins of its own.
    own = counts_of(chosen + (part * number)[:, None], tokens, parts * number).view(parts, number)
    counts = reduce_from_tensor_model_parallel_region(own.to(scores.dtype), router.tp_cp_group)
    held = counts.sum(dim=1, keepdim=True) / topk  # tokens of each part
    shares = counts / (topk * held).clamp(min=1)
    sums = (scores * tokens[:, None]).view(-1, parts, number).sum(dim=0)
    return number * (shares * sums).sum()


def _attached(router: Any, onto: Tensor, loss: Tensor) -> Tensor:
    loss = loss * getattr(router.config, ROUTER_LOSS_SHARE, 1.0)
    return MoEAuxLossAutoScaler.apply(onto, loss)  # type: ignore[no-any-return]


def within_capacity(
    router: Any, weights: Tensor, chosen: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights and the map [t, e] of the choices in `chosen` [t, e] that experts with a
    capacity accept.

    It is that of the `tokens` [t] that are true. What is computed with one shape in every step has
    room for the capacity of all positions.
    """
    config = router.config
    factor = config.moe_expert_capacity_factor
    number = weights.shape[1]
    # fp64, as if Python divided the integers: in fp32 the ceiling of a whole quotient may be one
    # more.
    capacity = torch.ceil(tokens.sum().double() * router.topk / number * factor)
    order = weights if config.moe_token_drop_policy == "probs" else chosen.to(weights.dtype)
    # `stable`: of equal tokens the earlier ones are taken, whatever the sorting kernel.
    place = (
        order.detach().masked_fill(~chosen, -math.inf).argsort(dim=0, descending=True, stable=True)
    )
    rank = place.argsort(dim=0)
    kept = chosen & (rank < capacity)
    weights = weights * kept
    if not config.moe_pad_expert_input_to_capacity:
        return weights, kept
    room = get_capacity(weights.shape[0] * router.topk, number, factor)
    if room > weights.shape[0]:
        return weights, torch.ones_like(kept)
    # Kept tokens come first. Others, whose weights are 0, fill the room that is left.
    first = kept.to(torch.int8).argsort(dim=0, descending=True, stable=True)[:room]
    return weights, torch.zeros_like(kept).scatter_(0, first, value=True)
