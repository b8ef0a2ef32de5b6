"""The registered products of rows with their groups' weights, forward and backward; `op` describes
their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.activation.op import _activation_backward
from mtrain_kernels.grouped_gemm.places import Places
from mtrain_kernels.linear import add_weight_gradient
from mtrain_kernels.operators import differentiable, operator
from mtrain_kernels.runtime import triton_obstacle


@operator("grouped_gemm", shapes=lambda x, weights: x.new_empty(x.shape[0], weights[0].shape[-2]))
def _grouped(x: Tensor, weights: Sequence[Tensor], ends: Tensor, implementation: str) -> Tensor:
    if implementation == "torch":
        return _cleared(
            torch._grouped_mm(_dense(x), _stacked(weights).transpose(1, 2), offs=ends), ends
        )
    from mtrain_kernels.grouped_gemm import triton

    return triton.rows_product(x, weights, ends)


@operator(
    "grouped_gemm_dx", shapes=lambda d_y, weights: d_y.new_empty(d_y.shape[0], weights[0].shape[-1])
)
def _grouped_dx(
    d_y: Tensor, weights: Sequence[Tensor], ends: Tensor, implementation: str
) -> Tensor:
    if implementation == "torch":
        return _cleared(torch._grouped_mm(_dense(d_y), _stacked(weights), offs=ends), ends)
    from mtrain_kernels.grouped_gemm import triton

    return triton.rows_product(d_y, weights, ends, transposed=True)


@operator(
    "grouped_gemm_dw",
    shapes=lambda d_y, x, ends: x.new_empty(ends.shape[0], d_y.shape[1], x.shape[1]),
)
def _grouped_dw(d_y: Tensor, x: Tensor, ends: Tensor, implementation: str) -> Tensor:
    if implementation == "torch":
        return torch._grouped_mm(_dense(d_y).T, _dense(x), offs=ends)
    from mtrain_kernels.grouped_gemm import triton

    made = triton.weights_product(d_y, x, ends)
    assert made is not None
    return made


@operator("grouped_gemm_add_dw", mutates=("into",))
def _add_dw(
    d_y: Tensor, x: Tensor, ends: Tensor, into: Sequence[Tensor], implementation: str
) -> None:
    shape = (d_y.shape[1], x.shape[1])
    if len(into) != len(ends) or any(not b.is_contiguous() or b.shape != shape for b in into):
        found = [(tuple(b.shape), b.stride()) for b in into]
        raise ValueError(
            f"gradients of {len(ends)} weights {shape} are added to so many dense buffers, not"
            f" {found}"
        )
    if implementation == "triton":
        from mtrain_kernels.grouped_gemm import triton

        triton.weights_product(d_y, x, ends, into)
        return
    made = _grouped_dw(d_y, x, ends, implementation) if implementation == "torch" else None
    rows = None if made is not None else ends.tolist()  # of the reference, which is given counts
    for g, buffer in enumerate(into):
        if made is not None:
            buffer.add_(made[g])
        else:
            assert rows is not None
            mine = slice(sum(rows[:g]), sum(rows[: g + 1]))
            # In the buffer's dtype, so that the product is not rounded before it is added.
            rows_of = (d_y[mine].to(buffer.dtype), x[mine].to(buffer.dtype))
            add_weight_gradient(buffer, *rows_of, plain=implementation == "reference")


def _dense(x: Tensor) -> Tensor:
    """Return `x` in dense rows: `contiguous` leaves the stride of a single row as it is, and
    torch's product refuses it.
    """
    return x.contiguous().view(-1).view(x.shape)


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return [g, n, k] of weights: a view where they lie one behind the other, else a copy, as
    torch's product wants it.
    """
    if weights[0].ndim == 3:
        return _dense(weights[0])
    places = Places.of(weights)
    n, k = places.shape
    # Neighbours by address may be separate storages, and a view must not leave its own.
    if (
        places.table is None
        and places.step == n * k
        and places.base.untyped_storage().nbytes()
        >= ((places.base.storage_offset() + places.groups * n * k) * places.base.element_size())
    ):
        return places.base.as_strided((places.groups, n, k), (n * k, k, 1))
    return torch.stack(list(weights))


def _cleared(y: Tensor, ends: Tensor) -> Tensor:
    """Return `y` with zeros behind the last group, where torch's product leaves the memory
    unwritten; the rest stays.
    """
    if triton_obstacle(y.device) is None:
        from mtrain_kernels.grouped_gemm import clear_triton

        return clear_triton.clear_behind(y, ends)
    if y.is_cpu:
        y[int(ends[-1]) :] = 0.0
        return y
    # Compared on the device: reading the end on the host would wait for it.
    return y.masked_fill_((torch.arange(y.shape[0], device=y.device) >= ends[-1])[:, None], 0.0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ends, ctx.implementation = inputs
    ctx.save_for_backward(x, ends, *weights)


def _product_gradients(ctx: Any, d_y: Tensor, implementation: str) -> dict[str, Any]:
    """Return the gradients of x and of the weights, as far as autograd needs them."""
    x, ends, *rest = ctx.saved_tensors
    weights = rest[: len(ctx.needs_input_grad[1])]
    d_x = _grouped_dx(d_y, weights, ends, implementation) if ctx.needs_input_grad[0] else None
    if not any(ctx.needs_input_grad[1]):
        return {"x": d_x, "weights": [None] * len(weights)}
    d_w = _grouped_dw(d_y, x, ends, implementation)
    return {"x": d_x, "weights": [d_w] if weights[0].ndim == 3 else list(d_w.unbind())}


def _gradients(ctx: Any, d_y: Tensor) -> dict[str, Any]:
    return _product_gradients(ctx, d_y, ctx.implementation)


differentiable(_grouped, save=_save, gradients=_gradients)


def _gated_shapes(x, weights):
    n = weights[0].shape[-2]
    return x.new_empty(x.shape[0], n // 2), x.new_empty(x.shape[0], n)


@operator("grouped_gated", shapes=_gated_shapes)
def _gated(
    x: Tensor, weights: Sequence[Tensor], ends: Tensor, share: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    from mtrain_kernels.grouped_gemm import triton

    return triton.gated_product(x, weights, ends, share, kind)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, ends, share, ctx.kind = inputs
    # The product is a result only because the backward needs it.
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, ends, *weights, output[1], share)


def _gated_gradients(ctx: Any, d_y: Tensor, _: Any) -> dict[str, Any]:
    *_kept, h, share = ctx.saved_tensors
    d_h, d_share = _activation_backward(d_y, h, share, ctx.kind, 0.0, 0.0)
    found = _product_gradients(ctx, d_h, "triton")
    return found if share is None else {**found, "share": d_share}


differentiable(_gated, save=_save_gated, gradients=_gated_gradients)


@operator("grouped_bias", shapes=lambda bias, rows: bias.new_empty(rows, bias.shape[1]))
def _bias_rows(bias: Tensor, ends: Tensor, rows: int, implementation: str) -> Tensor:
    """Return the bias of each of `rows` rows' group, zeros behind the last group."""
    owner = torch.searchsorted(
        ends, torch.arange(rows, device=bias.device, dtype=torch.int32), right=True
    )
    # the last row is that of nobody
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[owner]


@operator(
    "grouped_bias_backward", shapes=lambda d_y, ends: d_y.new_empty(ends.shape[0], d_y.shape[1])
)
def _bias_rows_backward(d_y: Tensor, ends: Tensor, implementation: str) -> Tensor:
    """Return the gradient of the bias as a grouped product with ones, which sums in fp32."""
    # rows of 16 bytes, as torch's product wants them
    ones = d_y.new_ones(d_y.shape[0], 16 // d_y.element_size())
    return _grouped_dw(d_y.contiguous(), ones, ends, implementation)[..., 0].contiguous()


def _save_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ends, _, ctx.implementation = inputs
    ctx.save_for_backward(ends)


def _bias_gradients(ctx: Any, d_y: Tensor) -> dict[str, Any]:
    return {"bias": _bias_rows_backward(d_y, *ctx.saved_tensors, ctx.implementation)}


differentiable(_bias_rows, save=_save_bias, gradients=_bias_gradients)
