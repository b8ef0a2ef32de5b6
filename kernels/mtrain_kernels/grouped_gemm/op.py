"""The grouped product of rows and their groups' weights: contract, gradients,
registration, choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.activation.op import _activation_backward, activation
from mtrain_kernels.grouped_gemm import cpu, reference
from mtrain_kernels.grouped_gemm.products import _add_dw, _bias_rows, _gated, _grouped, _grouped_dx
from mtrain_kernels.operators import float_obstacle
from mtrain_kernels.registry import (
    CPU,
    REFERENCE,
    TRITON,
    Case,
    Cost,
    Implementation,
    Model,
    Op,
    choose,
    pick,
)

FUSED = ("swiglu", "geglu", "geglu_tanh")  # activations that the kernel knows

PLAIN: dict[str, Any] = {"cpu": cpu, "reference": reference}
"""Implementations in plain torch, which read the counts on the host."""

Weights = Tensor | Sequence[Tensor]
MainGrads = Callable[[], Sequence[Tensor]]


def grouped_gemm(
    x: Tensor,
    weight: Weights,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
    main_grads: MainGrads | None = None,
) -> Tensor:
    """Compute `y_r = W_g x_r + b_g` for the group g of row r; groups are neighbours, and `counts`
    says how long each is.

    `x` [r, k], `weight` [g, n, k] or a list of g [n, k], which are read where they lie, `bias` [g,
    n], of one dtype (fp32, fp16 or bf16; products are summed in fp32), `counts` [g] integers on the
    same device, which the host never waits for. The result is [r, n] in x's dtype; rows behind the
    last group's give zeros and get gradient zero.

    `main_grads()` is called in the backward and gives the buffers [n, k], one for each of a list of
    weights, that their gradients are added to there and then; autograd gets memory that nobody
    wrote, as with megatron-core's gradient_accumulation_fusion.

    `impl` is `reference`, `cpu`, `triton`, `torch` (its grouped product: bf16, rows of a multiple
    of 16 bytes, which copies a list of weights, and is wrong for groups without rows on sm_100,
    pytorch issue 172439; never chosen by `auto`) or `auto`. Raises `ValueError` where shapes do
    not fit, `Unavailable` where the named one cannot run.
    """
    reference.require_grouped(x, weight, counts, bias)
    _require_list(weight, main_grads)
    name = _pick(impl, x.device, float_obstacle(x), _torch_obstacle(x, weight))
    if name in PLAIN and main_grads is None:
        return PLAIN[name].grouped_gemm(x, weight, counts, bias)  # type: ignore[no-any-return]
    if name in PLAIN:
        # The value comes without a graph; a node of its own adds the gradients to the buffers.
        y = PLAIN[name].grouped_gemm(x, _detached(weight), counts)
        y = _added(x, weight, counts, y, name, main_grads)
        return y if bias is None else y + reference.bias_rows(bias, counts, x.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    if main_grads is None:
        y = _grouped(x, _listed(weight), ends, name)
    else:
        y = _added(
            x, weight, ends, _grouped(x.detach(), _detached(weight), ends, name), name, main_grads
        )
    return y if bias is None else y + _bias_rows(bias, ends, x.shape[0], name)


def grouped_gated(
    x: Tensor,
    weight: Weights,
    counts: Tensor,
    kind: str,
    share: Tensor | None = None,
    *,
    impl: str = "auto",
    main_grads: MainGrads | None = None,
) -> Tensor:
    """Compute `activation(grouped_gemm(x, weight, counts), kind, weight=share)` in one kernel: [r,
    n / 2] in x's dtype.

    `kind` is `swiglu`, `geglu` or `geglu_tanh`; `share` [r] weighs rows and gets a gradient. The
    product is kept for the backward, rounded as it would be between the two. `impl` is `reference`,
    `cpu`, `triton` or `auto`; the rest is as in `grouped_gemm`.
    """
    reference.require_grouped(x, weight, counts, None)
    _require_list(weight, main_grads)
    if kind not in FUSED:
        raise ValueError(f"{kind!r} is none of {', '.join(FUSED)}")
    if _listed(weight)[0].shape[-2] % 2:
        raise ValueError(
            f"weight {tuple(_listed(weight)[0].shape)} must hold as many rows of gates as of ups"
        )
    if share is not None and share.shape != x.shape[:1]:
        raise ValueError(
            f"share {tuple(share.shape)} must be one number for each row of x {tuple(x.shape)}"
        )
    name = pick("grouped_gemm", impl, x.device, float_obstacle(x))
    if name != "triton":
        # torch's grouped product has no gated form, and the definition takes its place
        name = "cpu" if name == "cpu" else "reference"
        y = grouped_gemm(x, weight, counts, impl=name, main_grads=main_grads)
        return activation(y, kind, weight=share, impl="reference")
    ends = counts.cumsum(0).to(torch.int32)
    if main_grads is None:
        return _gated(x, _listed(weight), ends, share, kind)[0]
    # This graph would make the weights' gradients again; `_added` puts another in its place.
    with torch.no_grad():
        y, h = _gated(x, _listed(weight), ends, share, kind)
    return _Activated.apply(_added(x, weight, ends, h, "triton", main_grads), share, y, kind)  # type: ignore[no-any-return]


def rows_of(bias: Tensor, counts: Tensor, rows: int, *, impl: str = "auto") -> Tensor:
    """Return the row of `bias` [g, n] of each of `rows` rows' group, zeros behind the last group:
    [rows, n].
    """
    name = pick("grouped_gemm", impl, bias.device, float_obstacle(bias))
    if name in PLAIN:
        return reference.bias_rows(bias, counts, rows)
    return _bias_rows(bias, counts.cumsum(0).to(torch.int32), rows, name)


def _require_list(weight: Weights, main_grads: MainGrads | None) -> None:
    if main_grads is not None and isinstance(weight, Tensor):
        raise ValueError("main_grads are of a list of weights, one for each group")


def _listed(weight: Weights) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else list(weight)


def _detached(weight: Weights) -> list[Tensor]:
    return [w.detach() for w in _listed(weight)]


@torch.compiler.assume_constant_result
def _pick(impl: str, device: torch.device, triton: str | None, library: str | None) -> str:
    """Return the implementation to take; `triton` and `library` say why it or torch's cannot take
    this input.
    """
    return choose(OPS[0], impl, device, library if impl == "torch" else triton)[0]


def _torch_obstacle(x: Tensor, weight: Weights) -> str | None:
    n, k = _listed(weight)[0].shape[-2:]
    if x.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, not {x.dtype}"
    if n % 8 or k % 8:
        return (
            f"torch's grouped product needs rows of a multiple of 16 bytes, not {(n, k)} elements"
        )
    return None


class _Added(torch.autograd.Function):
    """A product that is known already, whose weights' gradients are added to buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        y: Tensor,
        name: str,
        buffers: MainGrads,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.name = name
        ctx.buffers = buffers
        # A view, so that the result is a tensor of its own and `y` stays outside of the graph.
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, ends, *weights = ctx.saved_tensors
        d_x = None
        if ctx.needs_input_grad[0]:
            if ctx.name in PLAIN:
                # In plain torch `ends` holds the counts.
                d_x = PLAIN[ctx.name].grouped_gemm(d_y, [w.t() for w in weights], ends)
            else:
                d_x = _grouped_dx(d_y, weights, ends, ctx.name)
        if any(ctx.needs_input_grad[5:]):
            _add_dw(d_y, x, ends, list(ctx.buffers()), ctx.name)
        # Never written: the buffers have the gradients, and autograd only checks shapes.
        return d_x, None, None, None, None, *(torch.empty_like(w) for w in weights)


def _added(
    x: Tensor, weight: Weights, ends: Tensor, y: Tensor, name: str, buffers: MainGrads | None
) -> Tensor:
    return _Added.apply(x, ends, y.detach(), name, buffers, *_listed(weight))  # type: ignore[no-any-return]


class _Activated(torch.autograd.Function):
    """The activation `y` of `h`, known already."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, share: Tensor | None, y: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(h, share)
        ctx.kind = kind
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        h, share = ctx.saved_tensors
        d_h, d_share = _activation_backward(d_y, h, share, ctx.kind, 0.0, 0.0)
        return d_h, None if share is None else d_share, None, None


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    rows = model.tokens * model.top_k
    counts = torch.full((model.experts,), rows // model.experts, dtype=torch.int32, device=device)
    x = torch.randn(rows, model.hidden, device=device, dtype=dtype)
    weight = torch.randn(
        model.experts, 2 * model.expert_ffn, model.hidden, device=device, dtype=dtype
    )
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "counts": counts}


def _cost(products: int) -> Any:
    """Return the cost of `products` of rows with the gate and up projections of all experts, each
    operand moved once.
    """

    def cost(m: Model) -> Cost:
        rows = m.tokens * m.top_k
        n = 2 * m.expert_ffn
        moved = 2 * (rows * (m.hidden + n) + m.experts * n * m.hidden)
        return Cost(bytes=products * moved, flops=products * 2 * rows * n * m.hidden)

    return cost


def _launch(model: Model) -> None:
    from mtrain_kernels.grouped_gemm import clear_triton, triton

    rows = model.tokens * model.top_k
    n = 2 * model.expert_ffn
    x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(model.experts, n, model.hidden, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(model.experts, dtype=torch.int32, device="meta")
    y = triton.rows_product(x, [weight], ends)
    triton.gated_product(x, [weight], ends, torch.empty(rows, device="meta"), "swiglu")
    triton.rows_product(y, [weight], ends, transposed=True)
    triton.weights_product(y, x, ends)
    triton.weights_product(y, x, ends, [torch.empty(model.experts, n, model.hidden, device="meta")])
    triton.weights_product(y, y.new_empty(rows, 8), ends)  # of biases
    clear_triton.clear_behind(y, ends)


OPS = (
    Op(
        "grouped_gemm",
        cases=(
            Case(
                "grouped_gemm",
                _make,
                lambda inputs, impl: grouped_gemm(**inputs, impl=impl),
                forward=_cost(1),
                backward=_cost(2),
                applies=lambda m: m.experts > 0,
                rivals={
                    "torch._grouped_mm": lambda inputs: lambda: grouped_gemm(**inputs, impl="torch")
                },
            ),
        ),
        launch=_launch,
        aot_models=("qwen3_30b_a3b",),
        implementations={
            "triton": TRITON,
            "cpu": CPU,
            "reference": REFERENCE,
            "torch": Implementation("torch", lambda d: None),
        },
    ),
)
