"""Kernels of the router: all experts of a few tokens at once; choice, weights and counts in one
pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two, sigmoid

# the key of an expert that must not be chosen, below that of minus infinity
LEAST = tl.constexpr(-0x80000000)
TINY = tl.constexpr(1e-20)
# scores that one program holds: a warp, so that it finds the greatest without shared memory
ELEMENTS = 512


@triton.jit
def _key(value, live):
    """Return int32 in the order of the floats: NaN greatest, -0 like 0; scores that are not live
    are least of all.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    # As integers negative floats are in reverse order, which flipping their lower bits mends.
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = tl.where(value == value, key, 0x7FFFFFFF)
    return tl.where(live, key, LEAST)


@triton.jit
def _scores(x, live, SCORE: tl.constexpr):
    """Return the scores of logits [tokens, places]; for a softmax after the choice these are the
    logits.
    """
    if SCORE == "sigmoid":
        return sigmoid(x)
    if SCORE == "pre_softmax":
        e = tl.exp(x - tl.max(tl.where(live, x, -float("inf")), 1)[:, None])
        e = tl.where(live, e, 0.0)
        return e / tl.sum(e, 1)[:, None]
    return x


@triton.jit
def _weights(score, chosen, SCORE: tl.constexpr, NORMALIZE: tl.constexpr):
    """Return weights before scaling, by place, and their divisor; zero where nothing is chosen."""
    weight = tl.where(chosen, score, 0.0)
    if SCORE == "softmax":
        e = tl.exp(score - tl.max(tl.where(chosen, score, -float("inf")), 1)[:, None])
        e = tl.where(chosen, e, 0.0)
        weight = e / tl.sum(e, 1)[:, None]
    total = tl.full([score.shape[0]], 1.0, tl.float32)
    if NORMALIZE:
        total = tl.sum(weight, 1) + TINY
    return weight / total[:, None], total


@triton.jit
def _open_groups(
    key,
    value,
    T: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Return keys [T, G * S] with those of all but the best groups replaced by the least."""
    keys = tl.reshape(key, (T, G, S))
    left = keys
    values = tl.reshape(value, (T, G, S))
    place = tl.arange(0, S)[None, None, :]
    worth = tl.zeros([T, G], tl.float32)
    for _ in tl.static_range(MEMBERS):
        # The lowest place among equals, as the stable sort of the definition takes it.
        at = tl.min(tl.where(left == tl.max(left, 2)[:, :, None], place, S), 2)
        hit = place == at[:, :, None]
        worth += tl.sum(tl.where(hit, values, 0.0), 2)
        left = tl.where(hit, LEAST, left)
    group = tl.arange(0, G)[None, :]
    rank = _key(worth, group < GROUPS)
    taken = tl.broadcast_to(group < 0, (T, G))
    for _ in tl.static_range(GROUP_TOPK):
        at = tl.min(tl.where(rank == tl.max(rank, 1)[:, None], group, G), 1)
        hit = group == at[:, None]
        taken = taken | hit
        rank = tl.where(hit, LEAST, rank)
    return tl.reshape(tl.where(taken[:, :, None], keys, LEAST), (T, G * S))


@kernel
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    indices_ptr,
    counts_ptr,
    tokens,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    MEMBERS: tl.constexpr,
    T: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    """Route a tile [T, G * S] with experts at places g * S + s: padded by group, so that any size
    forms a tile.
    """
    row = tl.program_id(0) * T + tl.arange(0, T)[:, None].to(tl.int64)
    place = tl.arange(0, G * S)[None, :]
    expert = place // S * (EXPERTS // GROUPS) + place % S
    inside = (place // S < GROUPS) & (place % S < EXPERTS // GROUPS)
    live = inside & (row < tokens)
    x = tl.load(logits_ptr + row * EXPERTS + expert, mask=live, other=0.0).to(tl.float32)
    score = _scores(x, inside, SCORE)
    value = x
    if BIAS:
        value = score + tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    elif GROUPS > 1:
        value = score
    key = _key(value, inside)
    if GROUPS > 1:
        key = _open_groups(key, value, T, G, S, GROUPS, GROUP_TOPK, MEMBERS)
    rank = tl.full([T, G * S], -1, tl.int32)
    for j in tl.static_range(TOPK):
        at = tl.min(tl.where(key == tl.max(key, 1)[:, None], place, G * S), 1)
        hit = place == at[:, None]
        rank = tl.where(hit, j, rank)
        key = tl.where(hit, LEAST, key)
    chosen = live & (rank >= 0)
    weight, _ = _weights(score, rank >= 0, SCORE, NORMALIZE)
    to = row * TOPK + rank
    tl.store(weights_ptr + to, cast(weight * scale, weights_ptr.dtype.element_ty), mask=chosen)
    tl.store(indices_ptr + to, tl.broadcast_to(expert, (T, G * S)).to(tl.int64), mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    at = tl.arange(0, G * S)
    at_expert = at // S * (EXPERTS // GROUPS) + at % S
    # Integers add up to the same in any order of atomics.
    tl.atomic_add(counts_ptr + at_expert, count.to(tl.int64), mask=count > 0)


@kernel
def route_backward_kernel(
    logits_ptr,
    indices_ptr,
    d_weights_ptr,
    d_logits_ptr,
    tokens,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    T: tl.constexpr,
    E: tl.constexpr,
):
    """Recompute the scores: reading the logits again is cheaper than keeping the scores."""
    row = tl.program_id(0) * T + tl.arange(0, T).to(tl.int64)
    expert = tl.arange(0, E)[None, :]
    inside = tl.broadcast_to(expert < EXPERTS, (T, E))
    live = inside & (row[:, None] < tokens)
    x = tl.load(logits_ptr + row[:, None] * EXPERTS + expert, mask=live, other=0.0).to(tl.float32)
    chosen = tl.broadcast_to(expert < 0, (T, E))
    d_weight = tl.zeros([T, E], tl.float32)
    for j in tl.static_range(TOPK):
        index = tl.load(indices_ptr + row * TOPK + j, mask=row < tokens, other=-1).to(tl.int32)
        d = tl.load(d_weights_ptr + row * TOPK + j, mask=row < tokens, other=0.0).to(tl.float32)
        hit = expert == index[:, None]
        chosen = chosen | hit
        d_weight = tl.where(hit, d[:, None] * scale, d_weight)
    score = _scores(x, inside, SCORE)
    weight, total = _weights(score, chosen, SCORE, NORMALIZE)
    d = d_weight
    if NORMALIZE:
        # Gradient of a division by the sum: each weight's own less the part that all share.
        inner = tl.sum(tl.where(chosen, weight * d, 0.0), 1)
        d = tl.where(chosen, (d - inner[:, None]) / total[:, None], 0.0)
    if SCORE == "sigmoid":
        d = tl.where(chosen, d * score * (1 - score), 0.0)
    elif SCORE == "pre_softmax":
        inner = tl.sum(tl.where(chosen, score * d, 0.0), 1)
        d = score * (d - inner[:, None])
    else:
        # Multiplied by the sum again, which gives the softmax before it was normalised.
        soft = weight * total[:, None]
        inner = tl.sum(tl.where(chosen, soft * d, 0.0), 1)
        d = tl.where(chosen, soft * (d - inner[:, None]), 0.0)
    tl.store(
        d_logits_ptr + row[:, None] * EXPERTS + expert,
        cast(d, d_logits_ptr.dtype.element_ty),
        mask=live,
    )


def forward(
    logits: Tensor,
    bias: Tensor | None,
    topk: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    group_topk: int,
    members: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [t, topk], indices [t, topk] and counts [e] of `logits` [t, e]."""
    logits = logits.contiguous()
    bias = None if bias is None else bias.contiguous()
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, topk)
    indices = torch.empty(tokens, topk, dtype=torch.int64, device=logits.device)
    counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
    if tokens == 0:
        return weights, indices, counts
    g = power_of_two(groups)
    s = power_of_two(experts // groups)
    t = max(1, ELEMENTS // (g * s))
    with on_device_of(logits):
        route_kernel[(ceil_div(tokens, t),)](
            logits,
            bias,
            weights,
            indices,
            counts,
            tokens,
            scale,
            EXPERTS=experts,
            TOPK=topk,
            SCORE=score,
            NORMALIZE=normalize,
            BIAS=bias is not None,
            GROUPS=groups,
            GROUP_TOPK=group_topk,
            MEMBERS=members,
            T=t,
            G=g,
            S=s,
            num_warps=1,
        )
    return weights, indices, counts


def backward(
    d_weights: Tensor, logits: Tensor, indices: Tensor, score: str, normalize: bool, scale: float
) -> Tensor:
    """Return the gradient of `logits` [t, e], given that of the weights [t, topk]."""
    logits = logits.contiguous()
    d_weights = d_weights.contiguous()
    tokens, experts = logits.shape
    d_logits = torch.empty_like(logits)
    if tokens == 0:
        return d_logits
    e = power_of_two(experts)
    t = max(1, ELEMENTS // e)
    with on_device_of(logits):
        route_backward_kernel[(ceil_div(tokens, t),)](
            logits,
            indices,
            d_weights,
            d_logits,
            tokens,
            scale,
            EXPERTS=experts,
            TOPK=indices.shape[1],
            SCORE=score,
            NORMALIZE=normalize,
            T=t,
            E=e,
            num_warps=1,
        )
    return d_logits
