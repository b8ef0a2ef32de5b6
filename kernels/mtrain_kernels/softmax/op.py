"""Softmax of attention scores: contract, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.registry import Case, Cost, Model, Op, pick
from mtrain_kernels.softmax import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`exp(scale x) / (exp(sink) + sum exp(scale x))` over the last axis, among the keys that each
    query sees.

    Arguments and result are those of `reference.softmax`: `x` [b, n, s, t] in fp32, fp16 or bf16,
    `mask` boolean and broadcastable to it, `sink` [n]; sums are kept in fp32. `impl` is
    `reference`, `triton` or `auto`. Raises `ValueError` where the shapes do not fit, `Unavailable`
    where the named implementation cannot run.
    """
    reference.require_softmax(x, mask, sink)
    if pick("softmax", impl, x.device, _obstacle(x, sink)) == "reference":
        return reference.softmax(x, scale=scale, causal=causal, mask=mask, sink=sink)
    return _softmax(x, mask, sink, float(scale), causal)[0]


def _obstacle(*tensors: Tensor | None) -> str | None:
    wrong = [str(t.dtype) for t in tensors if t is not None and t.dtype not in DTYPES]
    return f"{', '.join(wrong)} is none of fp32, fp16 and bf16" if wrong else None


@torch.library.custom_op("mtrain::softmax", mutates_args=())
def _softmax(
    x: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.softmax import triton

    return triton.forward(x, scale, causal, mask, sink)


@_softmax.register_fake
def _(x, mask, sink, scale, causal):
    top = x.new_empty(x.shape[:3], dtype=torch.float32)
    return x.new_empty(x.shape), top, torch.empty_like(top)


@torch.library.custom_op("mtrain::softmax_backward", mutates_args=())
def _softmax_backward(
    d_y: Tensor,
    x: Tensor,
    top: Tensor,
    total: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.softmax import triton

    return triton.backward(d_y, x, top, total, scale, causal, mask, sink)


@_softmax_backward.register_fake
def _(d_y, x, top, total, mask, sink, scale, causal):
    return x.new_empty(x.shape), x.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, sink, ctx.scale, ctx.causal = inputs
    _, top, total = output
    ctx.mark_non_differentiable(top, total)
    ctx.save_for_backward(x, top, total, mask, sink)


def _differentiate(ctx: Any, d_y: Tensor, *_: Any) -> tuple[Any, ...]:
    x, top, total, mask, sink = ctx.saved_tensors
    d_x, d_sink = _softmax_backward(d_y, x, top, total, mask, sink, ctx.scale, ctx.causal)
    return d_x, None, None if sink is None else d_sink, None, None


_softmax.register_autograd(_differentiate, setup_context=_save)


def _length(model: Model) -> int:
    return min(model.tokens, 2048)  # scores of longer sequences are not written out in training


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    s = _length(model)
    x = torch.randn(1, model.heads, s, s, device=device, dtype=dtype).requires_grad_()
    sink = torch.zeros(model.heads, device=device, dtype=dtype).requires_grad_()
    return {"x": x, "sink": sink, "scale": model.head_dim**-0.5, "causal": True}


def _moves(read: float, written: int) -> Any:
    """Return bytes of so many passes over the scores in BF16; a causal kernel reads half of them
    and writes all.
    """
    return lambda m: Cost(bytes=int(2 * m.heads * _length(m) ** 2 * (read + written)))


def _launch(model: Model) -> None:
    from mtrain_kernels.softmax import triton

    s = _length(model)
    x = torch.empty(1, model.heads, s, s, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, s, s, dtype=torch.bool, device="meta")
    sink = torch.empty(model.heads, device="meta")
    _, top, total = triton.forward(x, 1.0, True, None, sink)
    triton.backward(x, x, top, total, 1.0, True, None, sink)
    triton.forward(x, 1.0, False, mask, None)
    triton.backward(x, x, top, total, 1.0, False, mask, None)


OPS = (
    Op(
        "softmax",
        cases=(
            Case(
                "softmax",
                _make,
                lambda inputs, impl: softmax(**inputs, impl=impl),
                forward=_moves(0.5, 1),
                backward=_moves(1, 1),
            ),
        ),
        launch=_launch,
    ),
)
