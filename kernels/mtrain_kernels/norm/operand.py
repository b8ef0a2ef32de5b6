"""Norms whose result leaves in FP8, too, for the linear layer behind: contract and gradients.

The norm's kernel also writes the operand, with the bits of `quantize` of its result. The transposed
operand, for the gradient of the linear layer's weight, is made again in the backward from the
norm's saved tensors, so it takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.norm import op, reference
from mtrain_kernels.operators import differentiable, operator
from mtrain_kernels.quantize import reference as formats
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.quantize.op import (
    Operand,
    quantize_blocks,
    quantize_tensorwise,
    require_multiplier,
    tensor_range,
)
from mtrain_kernels.registry import pick
from mtrain_kernels.runtime import ceil_div, tile

Share = Callable[[Tensor], Tensor]


def norm_quantized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    subtract_mean: bool,
    zero_centered: bool = False,
    format: str = "e4m3",
    layout: str | None = None,
    share: Share | None = None,
    multiplier: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Operand]:
    """Return the norm, the new residual (empty without `residual`), and the norm as an `Operand`.

    Inputs are those of `layer_norm_residual` (`subtract_mean`) or `rms_norm_residual`. Scales are
    those of a `layout` of one row, or of the tensor without it: from the `multiplier` [1] of
    delayed scaling, else from its own greatest value, which `share` makes that of the whole where
    `x` is a part. The operand's shape is [m, h], x's leading axes being one. Raises `ValueError`
    where arguments do not fit, `Unavailable` where the named implementation cannot run.
    """
    op.require(x, weight, bias, residual)
    if layout is not None and (layout not in LAYOUTS or LAYOUTS[layout].rows != 1):
        raise ValueError(f"layout {layout!r} has no scales of one row")
    if format not in FORMATS or FORMATS[format].dtype is None:
        raise ValueError(f"no format {format!r}; choose e4m3 or e5m2")
    if multiplier is not None:
        if layout is not None:
            raise ValueError(
                f"a multiplier is of the whole tensor, and layout {layout!r} has scales of its own"
            )
        require_multiplier(multiplier, x)
    given = (x, residual, weight, bias, eps, zero_centered, subtract_mean)
    if pick("norm", impl, x.device, op.obstacle(x, residual, weight, bias)) != "triton":
        return _defined(*given, format, layout, share, multiplier)
    if layout is not None:
        how = "blocks"
    else:
        how = "amax" if multiplier is None else "tensor"
    y, total, mean, rstd, q, scale, amax = _norm_operand(
        *given, how, format, layout or "", multiplier
    )
    # the weight itself: where it is freed in between, and gathered again, its memory may be another
    kept = (x if residual is None else total).detach(), mean, rstd, weight, bias
    options = (zero_centered, x.dtype, format, layout or "")
    if layout is not None:
        data, scale = _typed(q, scale, format, layout)
        again = partial(_again, options=options)
        return y, total, Operand(data, scale, (*kept, None, None), again)
    if multiplier is None:
        whole = amax if share is None else share(amax.amax(0, keepdim=True))
        multiplier, scale = tensor_range(whole, format=format, impl="triton")
        with torch.no_grad():
            q, _ = _codes(*kept, multiplier, *options, False)
    else:
        scale = 1 / multiplier
    again = partial(_again, options=options)
    return y, total, Operand(_codes_in(format, q), scale, (*kept, multiplier, scale), again)


def _again(*kept: Tensor | None, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the operand transposed [h, m] and its scale, from the norm's saved tensors."""
    *made_from, whole = kept
    q, scale = _codes(*made_from, *options, True)
    format, layout = options[2:]
    if whole is None:
        return _typed(q, scale, format, layout)
    return _codes_in(format, q), whole


def _typed(q: Tensor, scale: Tensor, format: str, layout: str) -> tuple[Tensor, Tensor]:
    kind = torch.float8_e8m0fnu if LAYOUTS[layout].scale == "e8m0" else torch.float32
    return _codes_in(format, q), scale.view(kind)


def _codes_in(format: str, q: Tensor) -> Tensor:
    dtype = FORMATS[format].dtype
    assert dtype is not None, f"{format} has no dtype"
    return q.view(dtype)


def _defined(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    subtract_mean: bool,
    format: str,
    layout: str | None,
    share: Share | None,
    multiplier: Tensor | None,
) -> tuple[Tensor, Tensor, Operand]:
    """Return the definition: a norm, then its result quantised as it is and transposed."""
    total = x.new_empty(0)
    if residual is None and subtract_mean:
        y = reference.layer_norm(x, weight, bias, eps, zero_centered=zero_centered)
    elif residual is None:
        y = reference.rms_norm(x, weight, eps, zero_centered=zero_centered)
    elif subtract_mean:
        y, total = reference.layer_norm_residual(
            x, residual, weight, bias, eps, zero_centered=zero_centered
        )
    else:
        y, total = reference.rms_norm_residual(
            x, residual, weight, eps, zero_centered=zero_centered
        )
    if layout is not None:
        q = quantize_blocks(y, format=format, layout=layout, transpose=True, impl="reference")
    else:
        if multiplier is None and share is not None:
            multiplier = formats.multiplier(share(formats.finite_amax(y.detach()).view(1)), format)
        q = quantize_tensorwise(
            y, format=format, multiplier=multiplier, transpose=True, impl="reference"
        )
    return (
        y,
        total,
        Operand(q.data, q.scale, (q.transposed, q.transposed_scale), lambda *both: both),
    )


def _norm_operand_shapes(x, residual, subtract_mean, operand, layout):
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    q = (rows, width) if operand in ("blocks", "tensor") else (0,)
    scale: tuple[int, ...] = (0,)
    kind = torch.float32
    if operand == "blocks":
        scale = (rows, -(-width // LAYOUTS[layout].columns))
        kind = torch.uint8 if LAYOUTS[layout].scale == "e8m0" else torch.float32
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if residual is None else residual.new_empty(x.shape),
        x.new_empty(rows if subtract_mean else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(q, dtype=torch.uint8),
        x.new_empty(scale, dtype=kind),
        # the greatest values of the tiles of the kernel
        x.new_empty(
            0 if operand == "blocks" else max(1, ceil_div(rows, tile(width)[0])),
            dtype=torch.float32,
        ),
    )


@operator("norm_operand", shapes=_norm_operand_shapes)
def _norm_operand(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    subtract_mean: bool,
    operand: str,
    format: str,
    layout: str,
    multiplier: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from mtrain_kernels.norm import triton

    given = (x, residual, weight, bias, eps, zero_centered, subtract_mean)
    return triton.forward(*given, operand, format, layout, multiplier)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    op.save(ctx, inputs[:7], output[:4])
    ctx.mark_non_differentiable(*output[2:])


differentiable(_norm_operand, save=_save, gradients=op.gradients)


def _codes_shapes(x, weight, multiplier, layout, transpose):
    width = weight.shape[0]
    rows = x.numel() // width if width else 0
    q = x.new_empty((width, rows) if transpose else (rows, width), dtype=torch.uint8)
    if multiplier is not None:
        return q, x.new_empty(0, dtype=torch.float32)
    kind = torch.uint8 if LAYOUTS[layout].scale == "e8m0" else torch.float32
    return q, x.new_empty((width, ceil_div(rows, LAYOUTS[layout].columns)), dtype=kind)


@operator("norm_codes", shapes=_codes_shapes)
def _codes(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiplier: Tensor | None,
    zero_centered: bool,
    dtype: torch.dtype,
    format: str,
    layout: str,
    transpose: bool,
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.norm import operand_triton

    given = (
        x,
        mean,
        rstd,
        weight,
        bias,
        multiplier,
        zero_centered,
        dtype,
        format,
        layout,
        transpose,
    )
    return operand_triton.codes(*given)
