"""The router of a mixture of experts: contract, gradient, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.moe_router import reference
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick

MOST_EXPERTS = 2048  # the experts of one token live in the registers of one program


def moe_router(
    logits: Tensor,
    topk: int,
    *,
    score: str = "softmax",
    pre_softmax: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    expert_bias: Tensor | None = None,
    groups: int = 1,
    group_topk: int = 1,
    group_members: int = 2,
    experts: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `topk` experts of every token, best first, their weights, and how many tokens each
    expert got.

    Arguments and results are those of `reference.moe_router`: `logits` [t, e] in fp32, fp16 or
    bf16, weights [t, topk] in their dtype, indices [t, topk] and counts [e] in int64. `impl` is
    `reference`, `triton` or `auto`; given `experts` are always weighed by the reference, which has
    k scores to read of each token then. Raises `ValueError` where sizes or names do not fit,
    `Unavailable` where the named implementation cannot run. Sources: arXiv:1701.06538; DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2.
    """
    reference.require_router(logits, topk, score, expert_bias, groups, group_topk, group_members)
    if experts is not None and (
        experts.shape != (logits.shape[0], topk) or experts.dtype != torch.int64
    ):
        raise ValueError(
            f"experts must be int64 {(logits.shape[0], topk)}, not {experts.dtype}"
            f" {tuple(experts.shape)}"
        )
    chosen = pick("moe_router", impl, logits.device, _obstacle(logits, expert_bias))
    if experts is not None or chosen == "reference":
        return reference.moe_router(
            logits,
            topk,
            score=score,
            pre_softmax=pre_softmax,
            normalize=normalize,
            scale=scale,
            expert_bias=expert_bias,
            groups=groups,
            group_topk=group_topk,
            group_members=group_members,
            experts=experts,
        )
    kind = "pre_softmax" if score == "softmax" and pre_softmax else score
    divide = reference.normalizes(normalize, score, topk)
    # The bias only chooses, and gets no gradient.
    bias = None if expert_bias is None else expert_bias.detach()
    return _router(
        logits, bias, topk, kind, divide, float(scale), groups, group_topk, group_members
    )


def _obstacle(logits: Tensor, bias: Tensor | None) -> str | None:
    if logits.shape[1] > MOST_EXPERTS:
        return f"{logits.shape[1]} experts are more than {MOST_EXPERTS}"
    return float_obstacle(logits, bias)


def _router_shapes(logits, topk):
    tokens, experts = logits.shape
    return (
        logits.new_empty(tokens, topk),
        logits.new_empty(tokens, topk, dtype=torch.int64),
        logits.new_empty(experts, dtype=torch.int64),
    )


@operator("moe_router", shapes=_router_shapes)
def _router(
    logits: Tensor,
    bias: Tensor | None,
    topk: int,
    kind: str,
    normalize: bool,
    scale: float,
    groups: int,
    group_topk: int,
    members: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.moe_router import triton

    return triton.forward(logits, bias, topk, kind, normalize, scale, groups, group_topk, members)


@operator("moe_router_backward", shapes=lambda logits: logits.new_empty(logits.shape))
def _router_backward(
    d_weights: Tensor, logits: Tensor, indices: Tensor, kind: str, normalize: bool, scale: float
) -> Tensor:
    from mtrain_kernels.moe_router import triton

    return triton.backward(d_weights, logits, indices, kind, normalize, scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, ctx.kind, ctx.normalize, ctx.scale, *_ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, output[1])


def _gradients(ctx: Any, d_weights: Tensor, *_: Any) -> dict[str, Any]:
    logits, indices = ctx.saved_tensors
    return {
        "logits": _router_backward(d_weights, logits, indices, ctx.kind, ctx.normalize, ctx.scale)
    }


differentiable(_router, save=_save, gradients=_gradients)


def _settings(model: Model) -> dict[str, Any]:
    """Return the routing of a model: by groups with a bias as DeepSeek-V3 with its 256 experts, or
    by a plain softmax.
    """
    if model.experts == 256:
        return {"topk": model.top_k, "score": "sigmoid", "scale": 2.5, "groups": 8, "group_topk": 4}
    return {"topk": model.top_k}


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "logits": torch.randn(model.tokens, model.experts, device=device).requires_grad_()
    }
    if model.experts == 256:
        inputs["expert_bias"] = torch.zeros(model.experts, device=device)
    return {**inputs, **_settings(model)}


def _launch(model: Model) -> None:
    from mtrain_kernels.moe_router import triton

    logits = torch.empty(model.tokens, model.experts, device="meta")
    settings = _settings(model)
    kind = settings.get("score", "softmax")
    divide = "score" in settings
    limits = (settings.get("groups", 1), settings.get("group_topk", 1), 2)
    bias = logits[0] if divide else None
    weights, indices, _ = triton.forward(logits, bias, model.top_k, kind, divide, 1.0, *limits)
    triton.backward(weights, logits, indices, kind, divide, 1.0)


OPS = (
    Op(
        "moe_router",
        cases=(
            Case(
                "moe_router",
                _make,
                lambda inputs, impl: moe_router(**inputs, impl=impl),
                forward=lambda m: Cost(bytes=m.tokens * (4 * m.experts + 12 * m.top_k)),
                backward=lambda m: Cost(bytes=m.tokens * (8 * m.experts + 12 * m.top_k)),
                applies=lambda m: m.experts > 0,
            ),
        ),
        launch=_launch,
        aot_models=("deepseek_v3",),
    ),
)
