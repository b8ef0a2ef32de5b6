"""The grouped product of rows and their groups' weights: contract, gradients, registration, choice."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.grouped_gemm import reference
from mtrain_kernels.registry import REFERENCE, TRITON, Case, Cost, Implementation, Model, Op, choose

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Name of a GPU -> the implementation that bench/run.py found faster there, forward and backward together. A GPU that
# is not listed was not measured, and gets the library's.
MEASURED: dict[str, str] = {}


def grouped_gemm(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """`y_r = W_g x_r + b_g` for the group g of row r; groups are neighbours, and `counts` says how long each is.

    `x` [r, k], `weight` [g, n, k], `bias` [g, n] of one dtype (fp32, fp16 or bf16; products are summed in fp32),
    `counts` [g] integers on the same device, which the host never waits for. The result is [r, n] in x's dtype;
    rows behind the last group's give zeros and get gradient zero. `impl` is `reference`, `triton`, `torch` (its
    grouped product: bf16, rows of a multiple of 16 bytes) or `auto`: on a GPU what was measured to be faster there,
    elsewhere as for every op. Raises `ValueError` where shapes do not fit, `Unavailable` where the named one cannot
    run.
    """
    reference.require_grouped(x, weight, counts, bias)
    name = _pick(impl, x.device, _triton_obstacle(x), _torch_obstacle(x, weight))
    if name == "reference":
        return reference.grouped_gemm(x, weight, counts, bias)
    ends = counts.cumsum(0).to(torch.int32)
    y = _grouped(x, weight, ends, name)
    return y if bias is None else y + _bias_rows(bias, ends, x.shape[0], name)


@torch.compiler.assume_constant_result
def _pick(impl: str, device: torch.device, triton: str | None, library: str | None) -> str:
    """The implementation to take; `triton` and `library` say why it or torch's cannot take this input."""
    if impl == "auto" and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        favourite = MEASURED.get(gpu, "torch")
        if (library if favourite == "torch" else triton) is None:
            log.debug(
                "grouped_gemm on %s: %s (%s)", gpu, favourite, "measured" if gpu in MEASURED else "not measured"
            )
            return favourite
    return choose(OPS[0], impl, device, library if impl == "torch" else triton)[0]


def _triton_obstacle(x: Tensor) -> str | None:
    return None if x.dtype in DTYPES else f"{x.dtype} is none of fp32, fp16 and bf16"


def _torch_obstacle(x: Tensor, weight: Tensor) -> str | None:
    if x.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, not {x.dtype}"
    if weight.shape[1] % 8 or weight.shape[2] % 8:
        return f"torch's grouped product needs rows of a multiple of 16 bytes, not {tuple(weight.shape[1:])} elements"
    return None


@torch.library.custom_op("mtrain::grouped_gemm", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, ends: Tensor, implementation: str) -> Tensor:
    if implementation == "torch":
        return _cleared(torch._grouped_mm(_dense(x), _dense(weight).transpose(1, 2), offs=ends), ends)
    from mtrain_kernels.grouped_gemm import triton

    return triton.rows_product(x, weight, ends)


@_grouped.register_fake
def _(x, weight, ends, implementation):
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("mtrain::grouped_gemm_backward", mutates_args=())
def _grouped_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, ends: Tensor, implementation: str
) -> tuple[Tensor, Tensor]:
    if implementation == "torch":
        d_y, x = _dense(d_y), _dense(x)
        d_x = _cleared(torch._grouped_mm(d_y, _dense(weight), offs=ends), ends)
        return d_x, torch._grouped_mm(d_y.T, x, offs=ends)
    from mtrain_kernels.grouped_gemm import triton

    return triton.rows_product(d_y, weight, ends, transposed=True), triton.weights_product(d_y, x, ends)


@_grouped_backward.register_fake
def _(d_y, x, weight, ends, implementation):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _dense(x: Tensor) -> Tensor:
    """`x` in dense rows: `contiguous` leaves the stride of a single row as it is, and torch's product refuses it."""
    return x.contiguous().view(-1).view(x.shape)


def _cleared(y: Tensor, ends: Tensor) -> Tensor:
    """`y` with zeros behind the last group, where torch's product leaves what the memory held."""
    row = torch.arange(y.shape[0], device=y.device)
    return y.masked_fill_((row >= ends[-1])[:, None], 0.0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.implementation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    return *_grouped_backward(d_y, *ctx.saved_tensors, ctx.implementation), None, None


_grouped.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("mtrain::grouped_bias", mutates_args=())
def _bias_rows(bias: Tensor, ends: Tensor, rows: int, implementation: str) -> Tensor:
    """The bias of each of `rows` rows' group, zeros behind the last group."""
    owner = torch.searchsorted(ends, torch.arange(rows, device=bias.device, dtype=torch.int32), right=True)
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[owner]  # the last row is that of nobody


@_bias_rows.register_fake
def _(bias, ends, rows, implementation):
    return bias.new_empty(rows, bias.shape[1])


@torch.library.custom_op("mtrain::grouped_bias_backward", mutates_args=())
def _bias_rows_backward(d_y: Tensor, ends: Tensor, implementation: str) -> Tensor:
    """A bias is the weight of an input that is always 1: its gradient is a grouped product too, summed in fp32."""
    ones = d_y.new_ones(d_y.shape[0], 16 // d_y.element_size())  # rows of 16 bytes, as torch's product wants them
    if implementation == "torch":
        return torch._grouped_mm(_dense(d_y).T, ones, offs=ends)[..., 0].contiguous()
    from mtrain_kernels.grouped_gemm import triton

    return triton.weights_product(d_y.contiguous(), ones, ends)[..., 0].contiguous()


@_bias_rows_backward.register_fake
def _(d_y, ends, implementation):
    return d_y.new_empty(ends.shape[0], d_y.shape[1])


def _save_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ends, _, ctx.implementation = inputs
    ctx.save_for_backward(ends)


def _differentiate_bias(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
    return _bias_rows_backward(d_y, *ctx.saved_tensors, ctx.implementation), None, None, None


_bias_rows.register_autograd(_differentiate_bias, setup_context=_save_bias)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    rows = model.tokens * model.top_k
    counts = torch.full((model.experts,), rows // model.experts, dtype=torch.int32, device=device)
    x = torch.randn(rows, model.hidden, device=device, dtype=dtype)
    weight = torch.randn(model.experts, 2 * model.expert_ffn, model.hidden, device=device, dtype=dtype)
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "counts": counts}


def _cost(products: int) -> Any:
    """So many products of rows with the gate and up projections of all experts, each operand moved once."""

    def cost(m: Model) -> Cost:
        rows, n = m.tokens * m.top_k, 2 * m.expert_ffn
        moved = 2 * (rows * (m.hidden + n) + m.experts * n * m.hidden)
        return Cost(bytes=products * moved, flops=products * 2 * rows * n * m.hidden)

    return cost


def _launch(model: Model) -> None:
    from mtrain_kernels.grouped_gemm import triton

    rows, n = model.tokens * model.top_k, 2 * model.expert_ffn
    x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(model.experts, n, model.hidden, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(model.experts, dtype=torch.int32, device="meta")
    y = triton.rows_product(x, weight, ends)
    triton.rows_product(y, weight, ends, transposed=True)
    triton.weights_product(y, x, ends)
    triton.weights_product(y, y.new_empty(rows, 8), ends)  # of biases


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
                rivals={"torch._grouped_mm": lambda inputs: lambda: grouped_gemm(**inputs, impl="torch")},
            ),
        ),
        launch=_launch,
        aot_models=("qwen3_30b_a3b",),
        implementations={"triton": TRITON, "reference": REFERENCE, "torch": Implementation("torch", lambda d: None)},
    ),
)
