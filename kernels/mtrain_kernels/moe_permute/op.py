"""Tokens to rows sorted by expert and back: contract, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.moe_permute import reference
from mtrain_kernels.moe_permute.reference import Plan, plan
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick

__all__ = ["OPS", "Plan", "permute", "plan", "row_weights", "unpermute"]


def permute(x: Tensor, plan: Plan, *, impl: str = "auto") -> Tensor:
    """Return the rows [r, h] of tokens `x` [t, h] in the order of `plan`; rows that hold no copy
    are zero.

    x is fp32, fp16 or bf16, and so is the result; the gradient sums a token's copies in fp32.
    `impl` is `reference`, `triton` or `auto`. Raises `ValueError` where x and plan do not belong
    together, `Unavailable` where the named implementation cannot run.
    """
    reference.require_permute(x, plan.position)
    if pick("moe_permute", impl, x.device, float_obstacle(x)) == "reference":
        return reference.permute(x, plan)
    return _permute(x, plan.position, plan.source)


def unpermute(
    rows: Tensor, plan: Plan, weights: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Return tokens [t, h] from `rows` [r, h]: the sum in fp32 of a token's copies, each times its
    weight.

    The result has the dtype of the rows; `weights` [t, k] may have another and get their gradient
    in it. Dropped copies add nothing and get none. The rest is as in `permute`.
    """
    reference.require_unpermute(rows, plan.position, plan.source, weights)
    if pick("moe_permute", impl, rows.device, float_obstacle(rows, weights)) == "reference":
        return reference.unpermute(rows, plan, weights)
    return _unpermute(rows, plan.position, plan.source, weights)


def row_weights(weights: Tensor, plan: Plan) -> Tensor:
    """Return the weight of each row [r] from those of copies `weights` [t, k]; zero in rows that
    hold no copy.

    Both directions gather, so that a gradient is not added up from several places. Raises
    `ValueError` where weights and plan do not belong together.
    """
    if weights.shape != plan.position.shape:
        raise ValueError(
            f"weights {tuple(weights.shape)} must be {tuple(plan.position.shape)}, one for each"
            " copy"
        )
    return _RowWeights.apply(weights, plan.position, plan.source)  # type: ignore[no-any-return]


class _RowWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, position: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return _taken(weights, source)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Any, ...]:
        return _taken(d_rows, ctx.saved_tensors[0]), None, None


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """Return the flat `values` at `places`, zero where a place is negative."""
    # One zero behind the values serves all places that hold nothing.
    padded = torch.cat([values.reshape(-1), values.new_zeros(1)])
    return padded[torch.where(places < 0, values.numel(), places)]


@operator("moe_permute", shapes=lambda x, source: x.new_empty(source.shape[0], x.shape[1]))
def _permute(x: Tensor, position: Tensor, source: Tensor) -> Tensor:
    from mtrain_kernels.moe_permute import triton

    return triton.spread(x, source, position.shape[1])[0]


@operator(
    "moe_unpermute", shapes=lambda rows, position: rows.new_empty(position.shape[0], rows.shape[1])
)
def _unpermute(rows: Tensor, position: Tensor, source: Tensor, weights: Tensor | None) -> Tensor:
    from mtrain_kernels.moe_permute import triton

    return triton.combine(rows, position, weights)


@operator(
    "moe_unpermute_backward",
    shapes=lambda rows, weights: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)
def _unpermute_backward(
    d_out: Tensor, rows: Tensor, source: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.moe_permute import triton

    return triton.spread(d_out, source, weights.shape[1], weights, rows)  # type: ignore[return-value]


def _save_permute(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_gradients(ctx: Any, d_rows: Tensor) -> dict[str, Any]:
    position, source = ctx.saved_tensors
    # The gradient of copying a token is the sum over its copies.
    return {"x": _unpermute(d_rows, position, source, None)}


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, position, source, weights = inputs
    # Only the gradient of the weights reads the rows.
    ctx.save_for_backward(position, source, weights, None if weights is None else rows)


def _unpermute_gradients(ctx: Any, d_out: Tensor) -> dict[str, Any]:
    position, source, weights, rows = ctx.saved_tensors
    if weights is None:
        return {"rows": _permute(d_out, position, source)}
    d_rows, d_weights = _unpermute_backward(d_out, rows, source, weights)
    return {"rows": d_rows, "weights": d_weights}


differentiable(_permute, save=_save_permute, gradients=_permute_gradients)
differentiable(_unpermute, save=_save_unpermute, gradients=_unpermute_gradients)


def _copies(model: Model, device: torch.device) -> Tensor:
    scores = torch.rand(model.tokens, model.experts, device=device)
    return scores.topk(model.top_k).indices


def _make_permute(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.randn(model.tokens, model.hidden, device=device, dtype=dtype).requires_grad_()
    return {"x": x, "plan": plan(_copies(model, device), model.experts)}


def _make_unpermute(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    made = plan(_copies(model, device), model.experts)
    rows = torch.randn(
        made.source.shape[0], model.hidden, device=device, dtype=dtype
    ).requires_grad_()
    weights = torch.rand(model.tokens, model.top_k, device=device).requires_grad_()
    return {"rows": rows, "plan": made, "weights": weights}


def _moves(tokens: int, rows: int) -> Any:
    """Return bytes of so many passes over tokens and over rows in BF16."""
    return lambda m: Cost(bytes=2 * m.hidden * m.tokens * (tokens + rows * m.top_k))


def _launch(model: Model) -> None:
    from mtrain_kernels.moe_permute import triton

    x = torch.empty(model.tokens, model.hidden, dtype=torch.bfloat16, device="meta")
    position = torch.empty(model.tokens, model.top_k, dtype=torch.int32, device="meta")
    source = position.view(-1)
    weights = torch.empty(position.shape, device="meta")
    rows, _ = triton.spread(x, source, model.top_k)
    triton.combine(rows, position)
    triton.combine(rows, position, weights)
    triton.spread(x, source, model.top_k, weights, rows)


OPS = (
    Op(
        "moe_permute",
        cases=(
            Case(
                "moe_permute",
                _make_permute,
                lambda inputs, impl: permute(**inputs, impl=impl),
                forward=_moves(1, 1),
                backward=_moves(1, 1),
                applies=lambda m: m.experts > 0,
            ),
            Case(
                "moe_unpermute",
                _make_unpermute,
                lambda inputs, impl: unpermute(**inputs, impl=impl),
                forward=_moves(1, 1),
                backward=_moves(1, 2),
                applies=lambda m: m.experts > 0,
            ),
        ),
        launch=_launch,
        aot_models=("deepseek_v3",),
    ),
)
