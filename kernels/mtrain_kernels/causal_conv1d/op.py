"""Depthwise causal convolution: contract, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.causal_conv1d import reference
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick

WIDEST = 8  # taps are unrolled; the backward kernel has their square


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    segments: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute `act(bias + sum_j weight[:, w-1-j] x[..., t-j])`: each channel over its own last w
    times.

    Arguments and result are those of `reference.causal_conv1d`: `x` [b, d, t], `weight` [d, w],
    `bias` [d], each in fp32, fp16 or bf16, `segments` [b, t] integers. `impl` is `reference`,
    `triton` or `auto`. Raises `ValueError` where shapes or names do not fit, `Unavailable` where
    the named implementation cannot run.
    """
    reference.require_conv(x, weight, bias, activation, segments)
    if pick("causal_conv1d", impl, x.device, _obstacle(x, weight, bias)) == "reference":
        return reference.causal_conv1d(x, weight, bias, activation=activation, segments=segments)
    return _conv(x, weight, bias, segments, activation == "silu")


def _obstacle(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if weight.shape[1] > WIDEST:
        return f"a width of {weight.shape[1]} is more than {WIDEST}"
    return float_obstacle(x, weight, bias)


@operator("causal_conv1d", shapes=lambda x: x.new_empty(x.shape))
def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    from mtrain_kernels.causal_conv1d import triton

    return triton.forward(x, weight, bias, segments, silu)


def _conv_backward_shapes(x, weight):
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        # The bias's gradient is a sum over all times and leaves in fp32.
        x.new_empty(x.shape[1], dtype=torch.float32),
    )


@operator("causal_conv1d_backward", shapes=_conv_backward_shapes)
def _conv_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.causal_conv1d import triton

    return triton.backward(d_y, x, weight, bias, segments, silu)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_y: Tensor) -> dict[str, Any]:
    x, weight, bias, segments = ctx.saved_tensors
    d_x, d_weight, d_bias = _conv_backward(d_y, x, weight, bias, segments, ctx.silu)
    d_bias = None if bias is None else d_bias.to(bias.dtype)
    return {"x": d_x, "weight": d_weight, "bias": d_bias}


differentiable(_conv, save=_save, gradients=_gradients)


def _channels(model: Model) -> int:
    # x, b and c of a Mamba-2 layer: twice the width, 8 groups of 128 states
    return 2 * model.hidden + 2 * 8 * 128


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    d = _channels(model)
    return {
        "x": torch.randn(1, d, model.tokens, device=device, dtype=dtype).requires_grad_(),
        "weight": torch.randn(d, 4, device=device, dtype=dtype).requires_grad_(),
        "bias": torch.zeros(d, device=device, dtype=dtype).requires_grad_(),
    }


def _moves(tensors: int) -> Any:
    return lambda m: Cost(bytes=tensors * 2 * _channels(m) * m.tokens)


def _library(inputs: dict[str, Any]) -> Any:
    from causal_conv1d import causal_conv1d_fn

    return lambda: causal_conv1d_fn(
        inputs["x"], inputs["weight"], inputs["bias"], activation="silu"
    )


def _launch(model: Model) -> None:
    from mtrain_kernels.causal_conv1d import triton

    x = torch.empty(1, _channels(model), model.tokens, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(x.shape[1], 4, dtype=torch.bfloat16, device="meta")
    segments = torch.empty(1, model.tokens, dtype=torch.int32, device="meta")
    for marks in (None, segments):
        triton.forward(x, weight, weight[:, 0], marks, True)
        triton.backward(x, x, weight, weight[:, 0], marks, True)


OPS = (
    Op(
        "causal_conv1d",
        cases=(
            Case(
                "causal_conv1d",
                _make,
                lambda inputs, impl: causal_conv1d(**inputs, impl=impl),
                forward=_moves(2),
                backward=_moves(3),
                rivals={"causal_conv1d": _library},
            ),
        ),
        launch=_launch,
        aot_models=("llama3_8b",),
    ),
)
