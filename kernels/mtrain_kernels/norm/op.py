"""RMSNorm and LayerNorm, with and without the addition of a residual: contract, gradients,
registration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.norm import cpu, reference
from mtrain_kernels.operators import differentiable, float_obstacle, operator
from mtrain_kernels.registry import WITH_CPU, Case, Cost, Model, Op, pick
from mtrain_kernels.runtime import ceil_div

# A row lives in the registers of one program. Behind 16,384 columns the backward spills some: of
# 20,480 24 bytes a thread on sm_90 and 80 on sm_100, of 32,768 more than 300.
WIDEST = 20480
PLAIN: dict[str, Any] = {"cpu": cpu, "reference": reference}
"""Implementations in plain torch."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, impl: str = "auto"
) -> Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * w` over the last axis, with `w = weight`, or `1 +
    weight` if zero-centered.

    `x` [..., h], `weight` [h], in fp32, fp16 or bf16 each; the result has x's shape and dtype.
    `impl` is `reference`, `cpu`, `triton` or `auto`. Raises `ValueError` where shapes do not fit,
    `Unavailable` where the named implementation cannot run. Source: Zhang and Sennrich 2019,
    arXiv:1910.07467.
    """
    require(x, weight, None, None)
    name = pick("norm", impl, x.device, obstacle(x, weight), cpu.obstacle(x))
    if name != "triton":
        return PLAIN[name].rms_norm(x, weight, eps, zero_centered=zero_centered)
    return _norm(x, None, weight, None, eps, zero_centered, False)[0]


def rms_norm_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the new residual `x + residual`, and its `rms_norm`, as (normed, new residual).

    `residual` has x's shape and may have another dtype, which the new residual keeps; the sum is
    rounded to it before it is normalised. The rest is as in `rms_norm`.
    """
    require(x, weight, None, residual)
    name = pick("norm", impl, x.device, obstacle(x, residual, weight), cpu.obstacle(x))
    if name != "triton":
        return PLAIN[name].rms_norm_residual(x, residual, weight, eps, zero_centered=zero_centered)
    return _norm(x, residual, weight, None, eps, zero_centered, False)[:2]


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Compute `(x - mean(x)) / sqrt(var(x) + eps) * w + bias` over the last axis, with `w` as in
    `rms_norm`.

    `x` [..., h], `weight` [h], `bias` [h] or None; the variance is that of the population. The rest
    is as in `rms_norm`. Source: Ba et al. 2016, arXiv:1607.06450.
    """
    require(x, weight, bias, None)
    name = pick("norm", impl, x.device, obstacle(x, weight, bias), cpu.obstacle(x))
    if name != "triton":
        return PLAIN[name].layer_norm(x, weight, bias, eps, zero_centered=zero_centered)
    return _norm(x, None, weight, bias, eps, zero_centered, True)[0]


def layer_norm_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the new residual `x + residual`, and its `layer_norm`, as (normed, new residual); see
    `rms_norm_residual`.
    """
    require(x, weight, bias, residual)
    name = pick("norm", impl, x.device, obstacle(x, residual, weight, bias), cpu.obstacle(x))
    if name != "triton":
        return PLAIN[name].layer_norm_residual(
            x, residual, weight, bias, eps, zero_centered=zero_centered
        )
    return _norm(x, residual, weight, bias, eps, zero_centered, True)[:2]


def require(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """Raise `ValueError` where shapes do not fit, or something is no floating point."""
    if weight.ndim != 1 or x.ndim == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be the last axis of x {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(
            f"bias {tuple(bias.shape)} and weight {tuple(weight.shape)} must have one shape"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"residual {tuple(residual.shape)} and x {tuple(x.shape)} must have one shape"
        )
    for other in (weight, bias, residual):
        if other is not None and other.device != x.device:
            raise ValueError(
                f"x is on {x.device}, but one of weight, bias and residual is on {other.device}"
            )
    wrong = {
        str(t.dtype)
        for t in (x, weight, bias, residual)
        if t is not None and not t.is_floating_point()
    }
    if wrong:
        raise ValueError(
            f"x, weight, bias and residual must be floating point, not {', '.join(sorted(wrong))}"
        )


def obstacle(x: Tensor, *others: Tensor | None) -> str | None:
    """Return why the kernels do not take these, or None."""
    if x.shape[-1] > WIDEST:
        return f"a row of {x.shape[-1]} elements is wider than {WIDEST}"
    return float_obstacle(x, *others)


def _norm_shapes(x, residual, subtract_mean):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if residual is None else residual.new_empty(x.shape),
        x.new_empty(rows if subtract_mean else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@operator("norm", shapes=_norm_shapes)
def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    subtract_mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from mtrain_kernels.norm import triton

    return triton.forward(x, residual, weight, bias, eps, zero_centered, subtract_mean)  # type: ignore[return-value]


def _norm_backward_shapes(x, weight, has_bias):
    bias = weight.new_empty(weight.shape[0] if has_bias else 0, dtype=torch.float32)
    return x.new_empty(x.shape), torch.empty_like(weight), bias


@operator("norm_backward", shapes=_norm_backward_shapes)
def _norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
    zero_centered: bool,
    subtract_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from mtrain_kernels.norm import triton

    return triton.backward(
        dy, dtotal, x, weight, mean, rstd, has_bias, zero_centered, subtract_mean
    )


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the normed tensor and the statistics of its rows."""
    x, residual, weight, bias, _, ctx.zero_centered, ctx.subtract_mean = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    # Either output may be unused, and None is cheaper than zeros.
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    ctx.has_bias = bias is not None
    ctx.dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    # With a residual the sum was normed, and x itself is not kept.
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)


def gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> dict[str, Any]:
    """Return the gradients of the arguments of `_norm`."""
    x, weight, mean, rstd = ctx.saved_tensors
    if dy is None:  # only the new residual was used
        return {"x": None if dtotal is None else dtotal.to(ctx.dtype), "residual": dtotal}
    # Without a residual the second output is empty, and so is its gradient.
    dtotal = dtotal if ctx.has_residual else None
    dx, dweight, dbias = _norm_backward(
        dy, dtotal, x, weight, mean, rstd, ctx.has_bias, ctx.zero_centered, ctx.subtract_mean
    )
    return {
        "x": dx.to(ctx.dtype),
        "residual": dx if ctx.has_residual else None,
        "weight": dweight,
        "bias": dbias.to(ctx.bias_dtype) if ctx.has_bias else None,
    }


differentiable(_norm, save=save, gradients=gradients)


def _launch(model: Model) -> None:
    from mtrain_kernels.norm import operand_triton, triton

    x = torch.empty((model.tokens, model.hidden), dtype=torch.bfloat16, device="meta")
    weight = x[0]
    layout = "1x128_power_of_two"
    _, total, mean, rstd = triton.forward(x, x, weight, None, 1e-5, False, False)
    triton.backward(x, x, total, weight, mean, rstd, False, False, False)
    _, total, mean, rstd = triton.forward(x, x, weight, weight, 1e-5, True, True)
    triton.backward(x, x, total, weight, mean, rstd, True, True, True)
    triton.forward(x, x, weight, None, 1e-5, False, False, "blocks", "e4m3", layout)
    amax = triton.forward(x, x, weight, weight, 1e-5, True, True, "amax")[-1]
    for multiplier, transpose in ((None, True), (amax, False), (amax, True)):
        bias = weight if multiplier is not None else None
        moments = mean if bias is not None else mean[:0]
        operand_triton.codes(
            x, moments, rstd, weight, bias, multiplier, False, x.dtype, "e4m3", layout, transpose
        )


def _quantized(inputs: dict[str, Any], impl: str) -> Any:
    from mtrain_kernels.norm.operand import norm_quantized

    layout = "1x128_power_of_two"
    options = {"eps": inputs["eps"], "subtract_mean": False, "layout": layout, "impl": impl}
    return norm_quantized(inputs["x"], inputs["residual"], inputs["weight"], None, **options)


def _quantized_and_checked(inputs: dict[str, Any], impl: str) -> tuple[Tensor, ...]:
    """Return norm and sum, and how many bytes of the operand, as it is and transposed, are not
    those of the norm.
    """
    from mtrain_kernels.quantize.op import quantize_blocks

    y, total, operand = _quantized(inputs, impl)
    wanted = quantize_blocks(y, layout="1x128_power_of_two", transpose=True, impl=impl)
    made = operand.data, operand.scale, *operand.transposed(*operand.kept)
    pairs = [
        (a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made, wanted[:4], strict=True)
    ]
    return y, total, torch.stack([(a != b).sum() for a, b in pairs])


def _make(residual: bool, bias: bool) -> Any:
    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

        inputs: dict[str, Any] = {"x": leaf(model.tokens, model.hidden)}
        if residual:
            inputs["residual"] = leaf(model.tokens, model.hidden)
        inputs["weight"] = leaf(model.hidden)
        if bias:
            inputs["bias"] = leaf(model.hidden)
        return {**inputs, "eps": 1e-5}

    return make


def _moves(tensors: int) -> Any:
    return lambda model: Cost(bytes=tensors * 2 * model.tokens * model.hidden)


def _liger(inputs: dict[str, Any]) -> Any:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_rms_norm

    if "residual" in inputs:
        return lambda: liger_fused_add_rms_norm(
            inputs["x"], inputs["residual"], inputs["weight"], inputs["eps"]
        )
    return lambda: liger_rms_norm(inputs["x"], inputs["weight"], inputs["eps"])


def _transformer_engine(inputs: dict[str, Any]) -> Any:
    import transformer_engine.pytorch as te

    x = inputs["x"]
    kind = te.LayerNorm if "bias" in inputs else te.RMSNorm
    module = kind(x.shape[-1], eps=inputs["eps"], device=x.device, dtype=x.dtype)
    return lambda: module(x)


OPS = (
    Op(
        "norm",
        cases=(
            Case(
                "rms_norm",
                _make(False, False),
                lambda inputs, impl: rms_norm(**inputs, impl=impl),
                forward=_moves(2),
                backward=_moves(3),
                rivals={"liger": _liger, "transformer_engine": _transformer_engine},
            ),
            Case(
                "rms_norm_residual",
                _make(True, False),
                lambda inputs, impl: rms_norm_residual(**inputs, impl=impl),
                forward=_moves(4),
                backward=_moves(4),
                rivals={"liger": _liger},
            ),
            Case(
                "layer_norm",
                _make(False, True),
                lambda inputs, impl: layer_norm(**inputs, impl=impl),
                forward=_moves(2),
                backward=_moves(3),
                rivals={"transformer_engine": _transformer_engine},
            ),
            Case(
                "rms_norm_residual_fp8",
                _make(True, False),
                _quantized,
                forward=lambda model: Cost(
                    bytes=(9 * model.hidden + 4 * ceil_div(model.hidden, 128)) * model.tokens
                ),
                backward=_moves(4),
                checked=_quantized_and_checked,
            ),
        ),
        launch=_launch,
        aot_models=("llama3_405b", "llama3_70b"),  # rows of 16,384 have a backward of their own
        implementations=WITH_CPU,
    ),
)
