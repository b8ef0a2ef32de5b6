"""Operations that are functions in megatron-core, not layers: which of them a kernel of ours stands
for.

A layer is named by a spec (`mtrain.mcore.layers.backend`). Rotary embedding, routing and the
permutation of tokens are called by their names in megatron-core's modules. `override_operations`
sets those, for all models of this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import router, token_dispatcher
from mtrain_kernels import linear
from mtrain_kernels.moe_permute.op import Plan
from mtrain_kernels.moe_permute.op import permute as permute_rows
from mtrain_kernels.moe_permute.op import unpermute as unpermute_rows
from mtrain_kernels.moe_router.op import moe_router
from mtrain_kernels.rope.op import rotate
from torch import Tensor

from mtrain.config.engine import release
from mtrain.config.engine.kernels import ON_CPU
from mtrain.errors import BadEnvironment
from mtrain.mcore.layers.linear import accumulate_in_products


class Override(NamedTuple):
    """A name of megatron-core's, its object there, and the object of mtrain's that replaces it."""

    module: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]
    """Takes `impl=` first of all; the other arguments and the results are those of the original."""


def rotary(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    *,
    mla_rotary_interleaved: bool = False,
    impl: str,
) -> Tensor:
    """Rotate the first r elements of the heads `t` [s, b, n, d] by the angles `freqs` [s, 1, 1, r].

    MLA's pairs are neighbours (`multi_latent_attention`, since 0.19 `mla_rotary_interleaved`).
    megatron-core moves them apart on the way, in queries and in keys; here they stay where they
    are: scores are sums over the elements, in another order.
    """
    cos, sin = tables(freqs, rotary_interleaved, mscale)
    neighbours = rotary_interleaved or bool(multi_latent_attention) or mla_rotary_interleaved
    turned = rotate(t.transpose(0, 1), cos, sin, interleaved=neighbours, impl=impl)
    return turned.transpose(0, 1)


def tables(freqs: Tensor, interleaved: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [s, r/2] of megatron-core's angles [s, 1, 1, r], times `scale`."""
    angles = freqs.reshape(freqs.shape[0], -1)
    angles = angles[:, ::2] if interleaved else angles[:, : angles.shape[1] // 2]
    return angles.cos() * scale, angles.sin() * scale


def rotary_on_cpu(
    t: Tensor, freqs: Tensor, *args: Any, original: Callable[..., Tensor], **options: Any
) -> Tensor:
    """Turn as megatron-core does, by `mtrain_kernels.rope.cpu` where that has a faster way."""
    # Flags select other ways to pair the elements, which the CPU kernel does not make faster;
    # `mscale` only scales.
    plain = not any(args) and not any(value for name, value in options.items() if name != "mscale")
    if plain and t.is_cpu and t.dtype == torch.float32:
        return rotary(t, freqs, mscale=options.get("mscale", 1.0), impl="cpu")
    return original(t, freqs, *args, **options)


def routed(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    *,
    impl: str,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights [t, e], zero for unchosen experts, and the choices, from `logits` [t, e]."""
    groups: dict[str, Any] = {}
    if group_topk:
        assert num_groups is not None
        assert group_score_topk is not None
        groups = {"groups": num_groups, "group_topk": group_topk, "group_members": group_score_topk}
    # As in megatron-core, the bias counts with sigmoid scores only.
    weights, experts, _ = moe_router(
        logits,
        topk,
        score=score_function,
        pre_softmax=use_pre_softmax,
        scale=scaling_factor or 1.0,
        expert_bias=expert_bias if score_function == "sigmoid" else None,
        impl=impl,
        **groups,
    )
    # megatron-core's dispatchers read dense maps. `SparseRouter` hands lists over instead.
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    return torch.zeros_like(logits).scatter(1, experts, weights), chosen


def permuted(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    *,
    impl: str,
) -> tuple[Any, ...]:
    """Return copies [r, h] of `tokens` [t, h] sorted by expert, their weights [r], and the plan
    that leads back.

    Since 0.19 also where each expert's rows were padded and how many it then has: they are not
    padded.
    """
    weights = None
    if drop_and_pad and num_out_tokens is not None:
        plan, token = padded_plan(routing_map, num_out_tokens // routing_map.shape[1])
        if probs is not None:
            weights = probs.T.gather(1, token).flatten()
    else:
        plan = plan_of(routing_map)
        # The transposed map selects in the order of the rows: by expert, then by token.
        if probs is not None:
            weights = probs.T.contiguous().masked_select(routing_map.bool().T)
    found = permute_rows(tokens, plan, impl=impl), weights, plan
    return (*found, None, tokens_per_expert) if release.at_least(0, 19) else found


def unpermuted(
    permuted_tokens: Tensor,
    sorted_indices: Plan,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    *,
    impl: str,
) -> Tensor:
    """Return tokens [t, h] as the fp32 sums of their copies, which experts have weighted."""
    assert probs is None, "the weights of experts are applied before their outputs are added up"
    return unpermute_rows(permuted_tokens, sorted_indices, impl=impl)


def plan_of(routing_map: Tensor) -> Plan:
    """Return the plan of a map [t, e] that is true where a token goes: rows of one expert after
    another, tokens in order.

    For routers that give maps: those that drop tokens, or are balanced by sinkhorn. Without padding
    to a capacity (see `padded_plan`), a token has as
    many copies as the busiest one, so the host learns that number from the device, and the number
    of rows with it.
    """
    goes = routing_map.bool()
    held = goes.sum(1)
    # One transfer for both numbers: each would make the host wait.
    most, rows = torch.stack([held.max(), held.sum()]).tolist() if goes.shape[0] else (0, 0)
    # [t, e]: the row of a token's copy for an expert.
    place = (goes.T.reshape(-1).cumsum(0) - 1).view(goes.shape[1], -1).T
    token, expert = goes.nonzero(as_tuple=True)
    copy = (goes.cumsum(1) - 1)[token, expert]
    position = torch.full((goes.shape[0], max(most, 1)), -1, dtype=torch.int32, device=goes.device)
    position[token, copy] = place[token, expert].int()
    source = torch.empty(rows, dtype=torch.int32, device=goes.device)
    source[place[token, expert]] = (token * position.shape[1] + copy).int()
    return Plan(position, source, goes.sum(0).int())


def padded_plan(routing_map: Tensor, capacity: int) -> tuple[Plan, Tensor]:
    """Return the plan of a map [t, e] in which every expert has `capacity` tokens, and the token of
    each of its rows: int64 [e, capacity].

    Shapes follow from the capacity, so the host waits for nothing, and a CUDA graph can hold it. A
    token has a place for a copy to each expert: padding gives it to any of them.
    """
    goes = routing_map.bool()
    experts = goes.shape[1]
    # A stable sort puts the tokens of an expert first, in their order.
    order = goes.T.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    token = order[:, :capacity].contiguous()
    owner = torch.arange(experts, device=goes.device)
    row = owner * capacity + goes.cumsum(0) - 1
    position = torch.where(goes, row, -1).int()
    source = (token * experts + owner[:, None]).flatten().int()
    counts = torch.full((experts,), capacity, dtype=torch.int32, device=goes.device)
    return Plan(position, source, counts), token


OVERRIDES: dict[str, tuple[Override, ...]] = {
    "rope": (
        Override(
            rope_utils, "_apply_rotary_pos_emb_bshd", rope_utils._apply_rotary_pos_emb_bshd, rotary
        ),
    ),
    "moe_router": (
        Override(
            router,
            "topk_routing_with_score_function",
            router.topk_routing_with_score_function,
            routed,
        ),
    ),
    "moe_permute": (
        Override(token_dispatcher, "permute", token_dispatcher.permute, permuted),
        Override(token_dispatcher, "unpermute", token_dispatcher.unpermute, unpermuted),
    ),
}
"""Operation -> the names that it has in megatron-core."""


def override_operations(kernels: Any, group_score_topk: int | None = None) -> None:
    """Set the names of every operation to what `kernels` chose: megatron-core's own where that is
    `reference`.

    With groups of experts, each worth its `group_score_topk` best scores, routing is ours also
    then: megatron-core's own takes topk // group_topk of them, no other number for DeepSeek-V2 than
    for DeepSeek-V3. The library of a CPU's products is set where it was chosen, and the function
    that accumulates weight gradients where the keys request that.
    """
    on_a_cpu = ON_CPU in (kernels.linear, kernels.experts, kernels.loss)
    if on_a_cpu and kernels.cpu_matmul not in (None, "auto"):
        try:
            linear.use(kernels.cpu_matmul)
        except ValueError as error:
            raise BadEnvironment(f"kernels.cpu_matmul = {kernels.cpu_matmul}: {error}") from None
    if kernels.gradient_accumulation_fusion and kernels.linear != "te":
        accumulate_in_products()
    # The originals are set, too: an earlier model of this process may have replaced them.
    for operation, overrides in OVERRIDES.items():
        impl = getattr(kernels, operation) or "reference"
        for override in overrides:
            ours: Callable[..., Any] = functools.partial(override.ours, impl=impl)
            if override.ours is routed and group_score_topk:
                ours = functools.partial(ours, group_score_topk=group_score_topk)
            elif impl == "reference":
                ours = override.original
            elif impl == ON_CPU:
                ours = functools.partial(rotary_on_cpu, original=override.original)
            setattr(override.module, override.name, ours)
