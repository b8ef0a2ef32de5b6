"""Linear layers in FP8: quantisation, the three GEMMs, gradients, registration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_kernels.activation.op import activation, activation_gradient
from mtrain_kernels.admitted import missing
from mtrain_kernels.fp8_linear import cublas, reference
from mtrain_kernels.operators import operator
from mtrain_kernels.quantize import reference as formats
from mtrain_kernels.quantize.op import (
    Operand,
    Quantized,
    amax,
    quantize_blocks,
    quantize_tensorwise,
)
from mtrain_kernels.registry import (
    REFERENCE,
    TRITON,
    Case,
    Cost,
    Implementation,
    Model,
    Op,
    Unavailable,
    pick,
)
from mtrain_kernels.runtime import cuda_capability, kind_of

AddProduct = Callable[[Tensor], None]
Gradient = Callable[[Tensor, AddProduct], Tensor]
Share = Callable[[Tensor], Tensor]
Made = TypeVar("Made")


class Recipe(NamedTuple):
    """The granularity of scales, `tensorwise` or `blockwise` (128 elements of a row, 128 x 128 of a
    weight), and the formats.

    Scales come from current values, as in TransformerEngine; those of blocks are powers of two.
    `forward` is the format of inputs and weights, `backward` of gradients of outputs: e4m3 or e5m2.
    """

    kind: str
    forward: str = "e4m3"
    backward: str = "e4m3"

    @property
    def layout(self) -> str | None:
        """Return the layout of inputs that have scales for blocks."""
        return "1x128_power_of_two" if self.kind == "blockwise" else None


class Shares(NamedTuple):
    """Reductions of amax over the ranks that hold parts of one tensor: each returns the greatest
    value [1] of the whole.
    """

    x: Share | None = None
    weight: Share | None = None
    dy: Share | None = None


WHOLE = Shares()
GRADIENT = "fp8_gradient"
"""The op of products that are added to a matrix, as gradients of weights are."""
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_kept: dict[tuple[int, Recipe], tuple[Tensor, Any]] | None = None
_leave = False


@contextmanager
def weights_stay() -> Iterator[None]:
    """Promise that no weight changes while this is open: each is quantised at its first use, and
    kept both ways until the end.

    It is a byte of an element for each of two directions, for all micro-batches and
    recomputations of a step.
    """
    global _kept
    before = _kept
    _kept = {}
    try:
        yield
    finally:
        _kept = before


@contextmanager
def weights_leave() -> Iterator[None]:
    """Allow weights to be freed between a forward and its backward while this is open; they return
    for the backward.

    Then they are quantised once more, transposed, in the backward, and until then nothing of them
    is kept.
    """
    global _leave
    before = _leave
    _leave = True
    try:
        yield
    finally:
        _leave = before


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    *,
    shares: Shares = WHOLE,
    gradient: Gradient | None = None,
    operand: Operand | None = None,
    swiglu: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute `x weight^T` with gradients, all three products in FP8 and added up in fp32; `x`
    [..., k], `weight` [n, k].

    With an `operand`, which x was made into where x was made, x itself is not read. With `swiglu`,
    the implementation of that activation, x is [..., 2 k], gate and up side by side, and the
    activation is made on the way into FP8.

    The result [..., n] has the format of x. `gradient(weight, add)` returns autograd's gradient;
    `add(into)` adds the gradient [n, k] to a buffer, summed in fp32. None: autograd gets the
    gradient, rounded to the format of the weight. `impl` is `reference`, `triton`, `torch` (cuBLAS:
    tensorwise on sm_89 and newer, blockwise on sm_90, all sizes by 16) or `auto`. Raises
    `ValueError` for an unknown recipe, `Unavailable` where the named implementation cannot run, in
    the backward if that is where it cannot.
    """
    if recipe.kind not in ("tensorwise", "blockwise"):
        raise ValueError(f"no recipe {recipe.kind!r}; choose tensorwise or blockwise")
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] * (2 if swiglu else 1):
        halves = ", twice as wide for gate and up" if swiglu else ""
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [..., k]{halves} and"
            " [n, k]"
        )
    # reshape(-1, ...) cannot infer a length without elements.
    if x.numel():
        rows = x.reshape(-1, x.shape[-1])
    else:
        rows = x.new_empty((math.prod(x.shape[:-1]), x.shape[-1]))
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = _Linear.apply(rows, weight, recipe, shares, gradient, operand, swiglu, impl)
    else:
        # Without gradients no operand is kept for a backward.
        a = operand or _input(rows, recipe, shares.x, False, swiglu, impl)
        b = _weight(weight, recipe, shares.weight, False, impl)
        y = scaled_product(a.data, a.scale, b.data, b.scale, dtype=x.dtype, impl=impl)
    return y.view(*x.shape[:-1], weight.shape[0])


def quantized(
    x: Tensor,
    recipe: Recipe,
    format: str,
    share: Share | None,
    transpose: bool,
    impl: str,
    *,
    weight: bool = False,
    swiglu: bool = False,
) -> Quantized:
    """Quantise `x` [m, k] by a recipe; `share` reduces the amax of a part to that of the whole."""
    options: dict[str, Any] = {"format": format, "transpose": transpose, "swiglu": swiglu}
    # cuBLAS multiplies operands but does not make them.
    options["impl"] = "auto" if impl == "torch" else impl
    if recipe.kind == "tensorwise":
        given = None
        if share is not None:
            given = formats.multiplier(share(amax(x, swiglu=swiglu, impl=options["impl"])), format)
        return quantize_tensorwise(x, multiplier=given, **options)
    return quantize_blocks(
        x, layout="128x128_power_of_two" if weight else str(recipe.layout), **options
    )


def _input(
    x: Tensor, recipe: Recipe, share: Share | None, transpose: bool, swiglu: str | None, impl: str
) -> Quantized:
    return quantized(
        x, recipe, recipe.forward, share, transpose, swiglu or impl, swiglu=swiglu is not None
    )


def _weight(
    weight: Tensor, recipe: Recipe, share: Share | None, transpose: bool, impl: str
) -> Quantized:
    """Return the weight quantised by a recipe, once while `weights_stay`."""
    # The cached operand must serve the backward too, even if a forward made it.
    both = transpose or _kept is not None
    return while_weights_stay(
        weight,
        recipe,
        lambda: quantized(weight, recipe, recipe.forward, share, both, impl, weight=True),
    )


def while_weights_stay(weight: Tensor, recipe: Recipe, make: Callable[[], Made]) -> Made:
    """Call `make` for a weight, or for the first of several, once while `weights_stay`."""
    if _kept is None:
        return make()
    key = id(weight), recipe
    if key not in _kept:
        # The entry holds the weight, so that no other tensor can get its id meanwhile.
        _kept[key] = weight, make()
    made: Made = _kept[key][1]
    return made


def weights_are_leaving() -> bool:
    """Return whether `weights_leave` is open."""
    return _leave


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: Recipe,
        shares: Shares,
        gradient: Gradient | None,
        operand: Operand | None,
        swiglu: str | None,
        impl: str,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        a: Operand | Quantized
        if operand is not None:
            a = operand
            kept = operand.kept
            ctx.transposed = operand.transposed
        else:
            a = _input(x, recipe, shares.x, need_weight, swiglu, impl)
            kept = (a.transposed, a.transposed_scale)
            ctx.transposed = _as_kept
        b = _weight(weight, recipe, shares.weight, need_x and not _leave, impl)
        ctx.leaves = _leave
        w = (None, None) if _leave else (b.transposed, b.transposed_scale)
        # Gate and up are needed only for the gradient of x.
        gates = x if swiglu and need_x else None
        ctx.save_for_backward(weight, *w, gates, *(kept if need_weight else ()))
        ctx.options = recipe, shares, gradient, impl
        ctx.dtype = x.dtype
        ctx.swiglu = swiglu
        return scaled_product(a.data, a.scale, b.data, b.scale, dtype=x.dtype, impl=impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, w, w_scale, gates, *kept = ctx.saved_tensors
        recipe, shares, gradient, impl = ctx.options
        need_x, need_weight = ctx.needs_input_grad[:2]
        d = quantized(dy, recipe, recipe.backward, shares.dy, need_weight, impl)
        if need_x and ctx.leaves:
            again = _weight(weight, recipe, shares.weight, True, impl)
            w = again.transposed
            w_scale = again.transposed_scale
        if need_x:
            dx = scaled_product(d.data, d.scale, w, w_scale, dtype=ctx.dtype, impl=impl)
        else:
            dx = None
        if dx is not None and gates is not None:
            dx = activation_gradient(dx, gates, "swiglu", impl=ctx.swiglu)
        if not need_weight:
            return dx, *[None] * 7
        operands = d.transposed, d.transposed_scale, *ctx.transposed(*kept)
        if gradient is None:
            dweight = scaled_product(*operands, dtype=weight.dtype, impl=impl)
        else:
            dweight = gradient(weight, lambda into: add_scaled_product(into, *operands, impl=impl))
        return dx, dweight, *[None] * 6


def _as_kept(*both: Tensor) -> tuple[Tensor, ...]:
    return both


def scaled_product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Tensor:
    """Return `(a_scale a) (b_scale b)^T` [m, n] in `dtype`, accumulated in fp32, without gradients.

    `a` [m, k] and `b` [n, k] in e4m3 or e5m2, scales in fp32. Raises `ValueError` where they do not
    fit.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype {dtype} must be floating point")
    backend = _backend(a, a_scale, b, b_scale, impl)
    return _product(
        a.contiguous(), a_scale.contiguous(), b.contiguous(), b_scale.contiguous(), dtype, backend
    )


def add_scaled_product(
    into: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, impl: str = "auto"
) -> None:
    """Add `(a_scale a) (b_scale b)^T` to `into` [m, n], which has unit strides along n.

    The product is summed in fp32 and added in fp32, then rounded once to the format of `into`.
    Operands are those of `scaled_product`. Raises `ValueError` where they do not fit.
    """
    backend = _backend(a, a_scale, b, b_scale, impl)
    if into.shape != (a.shape[0], b.shape[0]) or not into.dtype.is_floating_point:
        raise ValueError(
            f"into {tuple(into.shape)} of {into.dtype} must be floating point"
            f" [{a.shape[0]}, {b.shape[0]}]"
        )
    if into.stride(1) != 1 < into.shape[1]:
        raise ValueError(f"into must have unit strides along its rows, not {into.stride()}")
    operands = (a.contiguous(), a_scale.contiguous(), b.contiguous(), b_scale.contiguous())
    _add_product(into, *operands, backend, adds_at_once(a.device))


def adds_at_once(device: torch.device) -> bool:
    """Return whether products add to a matrix themselves: on a GPU if parity has proven that on its
    generation, and on a CPU.

    Otherwise a separate pass adds their results.
    """
    return kind_of(device) != "cuda" or _proven(*cuda_capability(device))


@functools.cache
def _proven(major: int, minor: int) -> bool:
    return not missing(10 * major + minor, [GRADIENT])


def _backend(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, impl: str) -> str:
    """Return the name of the implementation that multiplies these operands.

    Raises `ValueError` for operands that do not fit, `Unavailable` if the named implementation
    does not take them.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [m, k] and [n, k]")
    for name, data, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if data.dtype not in EIGHT_BITS or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be e4m3 or e5m2 with scales in fp32, not {data.dtype} with"
                f" {scale.dtype}"
            )
    kinds = reference.rows_of(a, a_scale), reference.rows_of(b, b_scale)
    backend = pick("fp8_linear", impl, a.device)
    if backend == "torch" and (why := cublas.refused(a, b, kinds)):
        if impl == "torch":
            raise Unavailable(f"fp8_linear: torch cannot run: {why}")
        return _instead(a.device)
    return backend


@torch.compiler.assume_constant_result
def _instead(device: torch.device) -> str:
    """Return the choice of `auto` for operands that cuBLAS does not support."""
    return "triton" if OPS[0].implementations["triton"].available(device) is None else "reference"


@operator(
    "scaled_product", shapes=lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
)
def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, backend: str
) -> Tensor:
    if backend == "torch":
        return cublas.scaled_product(a, a_scale, b, b_scale, dtype)
    if backend == "reference":
        return reference.scaled_product(a, a_scale, b, b_scale, dtype)
    from mtrain_kernels.fp8_linear import triton

    return triton.scaled_product(a, a_scale, b, b_scale, dtype)


@operator("add_scaled_product", mutates=("into",))
def _add_product(
    into: Tensor,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    backend: str,
    at_once: bool,
) -> None:
    operands = a, a_scale, b, b_scale
    if at_once and backend == "triton":
        from mtrain_kernels.fp8_linear import triton

        triton.add_scaled_product(into, *operands)
        return
    if at_once and backend == "torch" and cublas.add_scaled_product(into, *operands):
        return
    into.add_(_product.function(*operands, torch.float32, backend))


def too_old(device: torch.device) -> str | None:
    """Return why products of FP8 cannot run on a device, or None."""
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return f"{torch.cuda.get_device_name(device)} is older than sm_89"
    return None


def _cublas(device: torch.device) -> str | None:
    return too_old(device) if kind_of(device) == "cuda" else "cuBLAS runs on NVIDIA's GPUs"


def _launch(model: Model) -> None:
    from mtrain_kernels.fp8_linear import triton

    k = model.hidden
    n = model.ffn
    a, b = (
        torch.empty((m, k), dtype=torch.float8_e4m3fn, device="meta") for m in (model.tokens, n)
    )
    one = torch.empty(1, dtype=torch.float32, device="meta")
    rows, other = (
        torch.empty((m, -(-k // 128)), dtype=torch.float32, device="meta")
        for m in (model.tokens, n)
    )
    triton.scaled_product(a, one, b, one, torch.bfloat16)
    triton.scaled_product(a, rows, b, other[: -(-n // 128)], torch.bfloat16)
    triton.scaled_product(a, rows, b, other, torch.float32)


def _launch_gradient(model: Model) -> None:
    from mtrain_kernels.fp8_linear import triton

    into = torch.empty((model.ffn, model.hidden), dtype=torch.float32, device="meta")
    one = torch.empty(1, dtype=torch.float32, device="meta")
    a, b = (
        torch.empty((size, model.tokens), dtype=torch.float8_e4m3fn, device="meta")
        for size in into.shape
    )
    a_scale, b_scale = (
        torch.empty((size, -(-model.tokens // 128)), dtype=torch.float32, device="meta")
        for size in into.shape
    )
    triton.add_scaled_product(into, a, one, b, one)
    triton.add_scaled_product(into, a, a_scale, b, b_scale)


def _gradient_case(name: str, kind: str) -> Case:
    recipe = Recipe(kind)

    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for operand, width in (("a", model.ffn), ("b", model.hidden)):
            x = torch.randn((width, model.tokens), device=device, dtype=dtype)
            made = quantized(x, recipe, "e4m3", None, False, "reference")
            given[operand] = made.data
            given[f"{operand}_scale"] = made.scale
        return {"into": torch.randn((model.ffn, model.hidden), device=device), **given}

    def call(inputs: dict[str, Any], impl: str) -> Tensor:
        into: Tensor = inputs["into"]
        backend = pick(GRADIENT, impl, into.device)
        _add_product(*inputs.values(), backend, True)
        return into

    def checked(inputs: dict[str, Any], impl: str) -> Tensor:
        return call(inputs | {"into": inputs["into"].clone()}, impl)

    def cost(model: Model) -> Cost:
        m = model.ffn
        n = model.hidden
        moved = (m + n) * model.tokens + 8 * m * n
        return Cost(bytes=moved, flops=2 * m * n * model.tokens)

    return Case(name, make, call, forward=cost, checked=checked)


def _case(name: str, kind: str, swiglu: bool = False) -> Case:
    recipe = Recipe(kind)
    halves = 1 + swiglu

    def make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(
            (model.tokens, halves * model.hidden), device=device, dtype=dtype
        ).requires_grad_()
        weight = (
            (torch.randn((model.ffn, model.hidden), device=device) * 0.02)
            .to(dtype)
            .requires_grad_()
        )
        return {"x": x, "weight": weight}

    def cost(products: int) -> Callable[[Model], Cost]:
        def of(model: Model) -> Cost:
            elements = model.tokens * (halves * model.hidden + model.ffn) + model.hidden * model.ffn
            return Cost(
                bytes=2 * products * elements,
                flops=2 * products * model.tokens * model.hidden * model.ffn,
            )

        return of

    def call(inputs: dict[str, Any], impl: str) -> Tensor:
        return fp8_linear(
            **inputs, recipe=recipe, swiglu=_activated_by(impl) if swiglu else None, impl=impl
        )

    def checked(inputs: dict[str, Any], impl: str) -> Tensor:
        """Return the number of elements that differ from a separate activation and GEMM."""
        first = activation(inputs["x"], "swiglu", impl=_activated_by(impl))
        ends = call(inputs, impl), fp8_linear(first, inputs["weight"], recipe, impl=impl)
        step = torch.ones_like(ends[0])
        leaves = [inputs["x"], inputs["weight"]]
        both = zip(*([end, *torch.autograd.grad(end, leaves, step)] for end in ends), strict=True)
        return torch.stack([(a != b).sum() for a, b in both])

    return Case(
        name, make, call, forward=cost(1), backward=cost(2), checked=checked if swiglu else None
    )


def _activated_by(impl: str) -> str:
    return "auto" if impl == "torch" else impl


IMPLEMENTATIONS = {
    "torch": Implementation("torch", _cublas),
    "triton": Implementation("triton", lambda device: TRITON.obstacle(device) or too_old(device)),
    "reference": REFERENCE,
}
OPS = (
    Op(
        "fp8_linear",
        cases=(
            _case("linear_tensorwise", "tensorwise"),
            _case("linear_blockwise", "blockwise"),
            _case("swiglu_linear_blockwise", "blockwise", swiglu=True),
        ),
        launch=_launch,
        implementations=IMPLEMENTATIONS,
        oldest=89,
    ),
    Op(
        GRADIENT,
        cases=(
            _gradient_case("gradient_tensorwise", "tensorwise"),
            _gradient_case("gradient_blockwise", "blockwise"),
        ),
        launch=_launch_gradient,
        implementations=IMPLEMENTATIONS,
        oldest=89,
    ),
)
