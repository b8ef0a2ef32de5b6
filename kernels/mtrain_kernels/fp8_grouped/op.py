"""Linear layers of experts in FP8: contract, gradients, registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_kernels.activation.op import activation, activation_gradients
from mtrain_kernels.fp8_grouped.products import (
    Grouped,
    add_weights_product,
    quantize_rows,
    quantize_weights,
    rows_product,
    weights_product,
)
from mtrain_kernels.fp8_linear.op import Recipe, too_old, weights_are_leaving, while_weights_stay
from mtrain_kernels.grouped_gemm.op import MainGrads, Weights
from mtrain_kernels.grouped_gemm.reference import require_grouped
from mtrain_kernels.registry import REFERENCE, TRITON, Case, Cost, Implementation, Model, Op, pick


class _Options(NamedTuple):
    recipe: Recipe
    swiglu: str | None
    again: bool
    main_grads: MainGrads | None
    backend: str
    learns: bool

    @property
    def one(self) -> bool:
        return self.recipe.kind == "tensorwise"


def grouped_fp8(
    x: Tensor,
    weight: Weights,
    counts: Tensor,
    recipe: Recipe,
    *,
    swiglu: str | None = None,
    share: Tensor | None = None,
    again: bool = False,
    main_grads: MainGrads | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute `y_r = W_g x_r` for the group g of row r with gradients, all three products in FP8
    and added up in fp32.

    `x` [r, k], `weight`, `counts` [g] and `main_grads` are those of `grouped_gemm`, and so is the
    result [r, n]. Each group has scales of its own, powers of two: see `fp8_grouped.reference`.
    With `swiglu`, the implementation of that activation, x is [r, 2 k], gate and up side by side,
    and the activation, times `share` [r], is made on the way into FP8. Autograd keeps of x its
    operand, transposed; with `again` that is made in the backward, of gate and up.

    `impl` is `reference`, `triton` or `auto`. Raises `ValueError` for an unknown recipe and where
    shapes do not fit, `Unavailable` where the named implementation cannot run.
    """
    if recipe.kind not in ("tensorwise", "blockwise"):
        raise ValueError(f"no recipe {recipe.kind!r}; choose tensorwise or blockwise")
    if swiglu is None and (share is not None or again):
        raise ValueError("share and again are of the activation, which swiglu names")
    if share is not None and share.shape != x.shape[:1]:
        raise ValueError(
            f"share {tuple(share.shape)} must be one number for each row of x {tuple(x.shape)}"
        )
    if x.ndim != 2 or (swiglu is not None and x.shape[1] % 2):
        raise ValueError(f"x {tuple(x.shape)} must be [rows, k], or gate and up side by side")
    require_grouped(x[:, : x.shape[1] // 2] if swiglu else x, weight, counts, None)
    if main_grads is not None and isinstance(weight, Tensor):
        raise ValueError("main_grads are of a list of weights, one for each group")
    backend = pick("fp8_grouped", impl, x.device)
    options = _Options(recipe, swiglu, again, main_grads, backend, torch.is_grad_enabled())
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    # Kernels compare rows with ends; the sum stays on the device, so that nothing waits for it.
    ends = counts.cumsum(0).to(torch.int32)
    return _Grouped.apply(x, share, ends, options, *weights)  # type: ignore[no-any-return]


def _of_weights(weights: Sequence[Tensor], options: _Options) -> Grouped:
    """Return the weights in FP8, made once while `weights_stay`."""

    def make() -> Grouped:
        return quantize_weights(weights, options.recipe.forward, options.one, options.backend)

    return while_weights_stay(weights[0], options.recipe, make)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, share: Tensor | None, ends: Tensor, options: _Options, *weights: Tensor
    ) -> Tensor:
        need_x, need_share = ctx.needs_input_grad[:2]
        # which says yes without gradients, too
        need_weight = options.learns and any(ctx.needs_input_grad[4:])
        activated = options.swiglu is not None
        backend = options.backend
        given: dict[str, Any] = {"share": share, "swiglu": activated}
        turned = need_weight and not options.again
        a = quantize_rows(
            x, ends, options.recipe.forward, options.one, backend, transposed=turned, **given
        )
        b = _of_weights(weights, options)
        gates = (
            x if activated and (need_x or need_share or (need_weight and options.again)) else None
        )
        kept = (a.transposed, a.transposed_scale) if turned else (None, None)
        # The backward quantises again with this amax, so that both forms have one scale.
        amax = a.amax if need_weight and options.again else None
        ctx.leaves = weights_are_leaving()
        # Weights that leave are not kept in FP8: the backward quantises them again.
        w = (None, None) if ctx.leaves else (b.transposed, b.transposed_scale)
        ctx.save_for_backward(ends, *w, gates, share, *kept, amax, *(weights if ctx.leaves else ()))
        ctx.options = options
        ctx.dtype = x.dtype
        ctx.rows = x.shape[0]
        ctx.weights = len(weights), weights[0].shape, weights[0].dtype
        return rows_product(a.data, a.scale, b.data, b.scale, ends, x.dtype, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ends, w, w_scale, gates, share, x, x_scale, amax, *weights = ctx.saved_tensors
        options: _Options = ctx.options
        need_x, need_share = ctx.needs_input_grad[:2]
        need_weight = any(ctx.needs_input_grad[4:])
        recipe = options.recipe
        one = options.one
        backend = options.backend
        inputs = need_x or need_share
        if inputs and ctx.leaves:
            again = _of_weights(weights, options)
            w = again.transposed
            w_scale = again.transposed_scale
        d = quantize_rows(
            dy, ends, recipe.backward, one, backend, straight=inputs, transposed=need_weight
        )
        dx = rows_product(d.data, d.scale, w, w_scale, ends, ctx.dtype, backend) if inputs else None
        dshare = None
        if dx is not None and options.swiglu is not None:
            dx, dshare = activation_gradients(
                dx, gates, "swiglu", weight=share, impl=options.swiglu
            )
        if not need_weight:
            return dx, dshare, None, None, *[None] * ctx.weights[0]
        if options.again:
            given: dict[str, Any] = {
                "share": share,
                "swiglu": True,
                "amax": amax,
                "straight": False,
            }
            made = quantize_rows(gates, ends, recipe.forward, one, backend, **given)
            x = made.transposed
            x_scale = made.transposed_scale
        operands = d.transposed, d.transposed_scale, x, x_scale, ends, ctx.rows
        return dx, dshare, None, None, *_weight_gradients(operands, ctx.weights, options)


def _weight_gradients(
    operands: tuple[Any, ...], weights: tuple[int, torch.Size, torch.dtype], options: _Options
) -> Sequence[Tensor]:
    """Return gradients for `number` weights of a shape and a dtype; uninitialised memory if they go
    to buffers.
    """
    number, shape, dtype = weights
    if options.main_grads is not None:
        add_weights_product(*operands, list(options.main_grads()), options.backend)
        # The gradients are in the buffers already; autograd only checks shapes and dtypes.
        return [operands[0].new_empty(shape, dtype=dtype) for _ in range(number)]
    made = weights_product(*operands, dtype, options.backend)
    return [made] if len(shape) == 3 else made.unbind()


def _launch(model: Model) -> None:
    from mtrain_kernels.fp8_grouped import quantize_triton, triton

    rows = model.tokens * model.top_k
    n = model.expert_ffn
    groups = model.experts
    x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device="meta")
    h = torch.empty(rows, 2 * n, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(groups, n, model.hidden, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    share = torch.empty(rows, device="meta")
    into = [torch.empty(n, model.hidden, device="meta")] * groups
    for one in (False, True):
        w, w_scale, _, _ = quantize_triton.quantize_weights([weight], "e4m3", one)
        d = quantize_triton.quantize_rows(h, share, ends, None, "e4m3", one, True, True, True)
        a = quantize_triton.quantize_rows(
            x, None, ends, None, "e5m2" if one else "e4m3", one, True, True, False
        )
        codes, weights, left, right = (
            part.view(torch.float8_e4m3fn) for part in (a[0], w, d[2], a[2])
        )
        left_scale, right_scale = (part[1 if one else 3] for part in (d, a))
        triton.rows_product(codes, a[1], weights, w_scale, ends, torch.bfloat16)
        triton.weights_product(left, left_scale, right, right_scale, ends, rows, into)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    rows = model.tokens * model.top_k
    counts = torch.full((model.experts,), rows // model.experts, dtype=torch.int32, device=device)
    x = torch.randn(rows, model.hidden, device=device, dtype=dtype)
    weight = (
        torch.randn(model.experts, 2 * model.expert_ffn, model.hidden, device=device, dtype=dtype)
        * 0.02
    )
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "counts": counts}


def _made_activated(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    found = _make(model, device, dtype)
    rows = model.tokens * model.top_k
    width = model.expert_ffn
    weight = torch.randn(model.experts, model.hidden, width, device=device, dtype=dtype) * 0.02
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype).requires_grad_()
    share = torch.rand(rows, device=device).requires_grad_()
    return {"x": x, "weight": weight.requires_grad_(), "counts": found["counts"], "share": share}


def _cost(products: int, activated: bool) -> Callable[[Model], Cost]:
    def cost(m: Model) -> Cost:
        rows = m.tokens * m.top_k
        width = m.expert_ffn * (1 if activated else 2)
        moved = 2 * (
            rows * ((2 * width if activated else width) + m.hidden) + m.experts * width * m.hidden
        )
        return Cost(bytes=products * moved, flops=products * 2 * rows * width * m.hidden)

    return cost


def _case(name: str, kind: str, activated: bool = False) -> Case:
    recipe = Recipe(kind)

    def call(inputs: dict[str, Any], impl: str) -> Tensor:
        return grouped_fp8(**inputs, recipe=recipe, swiglu=impl if activated else None, impl=impl)

    def checked(inputs: dict[str, Any], impl: str) -> Tensor:
        """Return bytes in which value and gradients are not those of the activation first and then
        the product.
        """
        rest = {key: inputs[key] for key in ("weight", "counts")}
        first = activation(inputs["x"], "swiglu", weight=inputs["share"], impl=impl)
        ends = call(inputs, impl), grouped_fp8(first, **rest, recipe=recipe, impl=impl)
        step = torch.ones_like(ends[0])
        leaves = [inputs[key] for key in ("x", "share", "weight")]
        both = zip(*([end, *torch.autograd.grad(end, leaves, step)] for end in ends), strict=True)
        return torch.stack([(a != b).sum() for a, b in both])

    return Case(
        name,
        _made_activated if activated else _make,
        call,
        forward=_cost(1, activated),
        backward=_cost(2, activated),
        applies=lambda m: m.experts > 0,
        checked=checked if activated else None,
    )


OPS = (
    Op(
        "fp8_grouped",
        cases=(
            _case("experts_tensorwise", "tensorwise"),
            _case("experts_blockwise", "blockwise"),
            _case("swiglu_experts_blockwise", "blockwise", activated=True),
        ),
        launch=_launch,
        aot_models=("qwen3_30b_a3b",),
        implementations={
            "triton": Implementation(
                "triton", lambda device: TRITON.obstacle(device) or too_old(device)
            ),
            "reference": REFERENCE,
        },
        oldest=89,
    ),
)
