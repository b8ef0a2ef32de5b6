"""Gated and squared activations: contract, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.activation import reference
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick


def activation(
    x: Tensor,
    kind: str,
    *,
    weight: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    impl: str = "auto",
) -> Tensor:
    """Return the activation `kind` of `x` [..., f'], times `weight` [...] where given: [..., f] in
    x's dtype.

    `kind` is `swiglu`, `geglu`, `geglu_tanh`, `swiglu_clamped` (gate and up are the halves of the
    last axis, f' = 2f; the last one knows `alpha` and `limit`) or `squared_relu` (f' = f);
    `reference.activation` has the formulas. x and weight in fp32, fp16 or bf16 each, both get
    gradients. `impl` is `reference`, `triton` or `auto`. Raises `ValueError` where kind or shapes
    do not fit, `Unavailable` where the named implementation cannot run.
    """
    reference.require(x, kind, weight)
    if weight is not None and weight.device != x.device:
        raise ValueError(f"x is on {x.device}, its weight on {weight.device}")
    if pick("activation", impl, x.device, float_obstacle(x, weight)) == "reference":
        return reference.activation(x, kind, weight=weight, alpha=alpha, limit=limit)
    return _activation(x, weight, kind, alpha, limit)


def activation_gradient(dy: Tensor, x: Tensor, kind: str, *, impl: str = "auto") -> Tensor:
    """Return the gradient of `x` [..., f'] from that of its activation, `dy` [..., f], where nobody
    kept a graph.
    """
    return activation_gradients(dy, x, kind, impl=impl)[0]


def activation_gradients(
    dy: Tensor, x: Tensor, kind: str, *, weight: Tensor | None = None, impl: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `x` [..., f'] and of its `weight` [...], if it has one; see
    `activation_gradient`.
    """
    reference.require(x, kind, weight)
    if dy.shape != (*x.shape[:-1], x.shape[-1] // (2 if kind in reference.GATED else 1)):
        raise ValueError(f"dy {tuple(dy.shape)} is no gradient of the {kind} of x {tuple(x.shape)}")
    if pick("activation", impl, x.device, float_obstacle(x, weight, dy)) != "reference":
        # Only swiglu_clamped reads the two numbers, the defaults of `activation`.
        dx, dweight = _activation_backward(dy, x, weight, kind, 1.702, 7.0)
        return dx, None if weight is None else dweight
    # The caller is often inside a backward, where autograd records nothing.
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
        y = reference.activation(leaves[0], kind, weight=leaves[1] if weight is not None else None)
        dx, *rest = torch.autograd.grad(y, leaves, dy)
    return dx, rest[0] if rest else None


def _activation_shapes(x, kind):
    return x.new_empty(
        (*x.shape[:-1], x.shape[-1] // 2 if kind in reference.GATED else x.shape[-1])
    )


@operator("activation", shapes=_activation_shapes)
def _activation(x: Tensor, weight: Tensor | None, kind: str, alpha: float, limit: float) -> Tensor:
    from mtrain_kernels.activation import triton

    return triton.forward(x, weight, kind, alpha, limit)


def _activation_backward_shapes(x, weight):
    # An operator returns a fixed number of tensors: an empty one stands for no weight.
    d_weight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), d_weight


@operator("activation_backward", shapes=_activation_backward_shapes)
def _activation_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, kind: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.activation import triton

    return triton.backward(dy, x, weight, kind, alpha, limit)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.options = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: Tensor) -> dict[str, Any]:
    x, weight = ctx.saved_tensors
    dx, dweight = _activation_backward(dy, x, weight, *ctx.options)
    return {"x": dx, "weight": None if weight is None else dweight}


differentiable(_activation, save=_save, gradients=_gradients)


def _launch(model: Model) -> None:
    from mtrain_kernels.activation import triton

    # Meta tensors: `aot` compiles what is launched on them without a GPU.
    x = torch.empty((model.tokens, 2 * model.ffn), dtype=torch.bfloat16, device="meta")
    weight = torch.empty(model.tokens, dtype=torch.float32, device="meta")
    triton.backward(triton.forward(x, None, "swiglu", 0.0, 0.0), x, None, "swiglu", 0.0, 0.0)
    triton.backward(triton.forward(x, weight, "geglu", 0.0, 0.0), x, weight, "geglu", 0.0, 0.0)


def _sizes(model: Model, experts: bool) -> tuple[int, int]:
    return (model.tokens * model.top_k, model.expert_ffn) if experts else (model.tokens, model.ffn)


def _case(name: str, kind: str, experts: bool = False) -> Case:
    halves = 2 if kind in reference.GATED else 1

    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        rows, width = _sizes(model, experts)
        x = torch.randn((rows, halves * width), device=device, dtype=dtype).requires_grad_()
        weight = torch.rand(rows, device=device).requires_grad_() if experts else None
        return {"x": x, "kind": kind, "weight": weight}

    def moves(halves_moved: int) -> Any:
        def cost(model: Model) -> Cost:
            rows, width = _sizes(model, experts)
            return Cost(bytes=2 * halves_moved * rows * width + (8 if experts else 0) * rows)

        return cost

    return Case(
        name,
        make,
        lambda inputs, impl: activation(**inputs, impl=impl),
        forward=moves(halves + 1),
        backward=moves(2 * halves + 1),
        applies=(lambda model: model.experts > 0) if experts else (lambda model: True),
        rivals={"liger": _liger} if kind == "swiglu" and not experts else {},
    )


def _liger(inputs: dict[str, Any]) -> Any:
    from liger_kernel.transformers.functional import liger_swiglu

    # Liger takes gate and up as two tensors; splitting them is not timed.
    gate, up = (
        half.detach().contiguous().requires_grad_() for half in inputs["x"].chunk(2, dim=-1)
    )
    return lambda: liger_swiglu(gate, up)


OPS = (
    Op(
        "activation",
        cases=(
            _case("swiglu", "swiglu"),
            _case("swiglu_experts", "swiglu", experts=True),
            _case("geglu", "geglu"),
            _case("squared_relu", "squared_relu"),
        ),
        launch=_launch,
    ),
)
