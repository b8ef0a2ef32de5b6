"""FP8, MXFP8 and NVFP4: contract and registration; nothing here has gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain_kernels.operators import FLOATS, operator
from mtrain_kernels.quantize import reference
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.registry import Case, Cost, Model, Op, pick
from mtrain_kernels.runtime import GRID, as_rows, ceil_div


class Quantized(NamedTuple):
    """`data` [m, n] and `scale`; where wanted the `transposed` data [n, m] and its scale, else both
    empty.

    `amax` [1] fp32 is the greatest finite absolute value, where the whole tensor has one scale;
    else it is empty. A number is `scale data`. For one scale `scale` is [1] fp32; for blocks
    [ceil(m / rows), ceil(n / columns)].
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor
    amax: Tensor


class Operand(NamedTuple):
    """The input [m, k] of linear layers in FP8, by who made the input: one scale, or one for each
    block of a row.

    `transposed(*kept)` gives the input transposed [k, m] and its scale, for the gradient of the
    weight.
    """

    data: Tensor
    scale: Tensor
    kept: tuple[Tensor | None, ...]
    transposed: Callable[..., tuple[Tensor, Tensor]]


def quantize_tensorwise(
    x: Tensor,
    *,
    format: str = "e4m3",
    multiplier: Tensor | None = None,
    transpose: bool = False,
    swiglu: bool = False,
    impl: str = "auto",
) -> Quantized:
    """Quantise to FP8 with one scale for the tensor: current scaling, or delayed scaling with the
    `multiplier` [1] fp32 given.

    `x` [..., n] in fp32, fp16 or bf16, taken as [m, n]; `format` "e4m3" or "e5m2". With `swiglu` it
    is [..., 2 n], and what is quantised is silu(gate) times up of the two halves, rounded to x's
    dtype. For delayed scaling see `reference.delayed_multiplier` and `push_amax_`. Raises
    `ValueError` where arguments do not fit, `Unavailable` where the named implementation cannot
    run. Definition: `quantize.reference`.
    """
    rows = _rows(x, format, swiglu)
    if multiplier is not None:
        require_multiplier(multiplier, x)
    backend = pick("quantize", impl, x.device, _obstacle(rows))
    data, scale, transposed, amax = _tensorwise(
        rows, multiplier, format, transpose, swiglu, backend
    )
    dtype = FORMATS[format].dtype
    again = scale if transpose else scale.new_empty(0)
    return Quantized(data.view(dtype), scale, transposed.view(dtype), again, amax)


def quantize_blocks(
    x: Tensor,
    *,
    format: str = "e4m3",
    layout: str = "1x128",
    transpose: bool = False,
    swiglu: bool = False,
    impl: str = "auto",
) -> Quantized:
    """Quantise to FP8 with a scale for each block: `layout` "1x128", "128x128", each with
    "_power_of_two", or "mx" (MXFP8).

    The transpose of a layout with one row is quantised anew along its own rows. `x`, `format`,
    `swiglu` and errors are those of `quantize_tensorwise`.
    """
    rows = _rows(x, format, swiglu)
    _require_layout(layout)
    backend = pick("quantize", impl, x.device, _obstacle(rows))
    data, scale, transposed, transposed_scale = _blocks(
        rows, format, layout, transpose, swiglu, backend
    )
    dtype = FORMATS[format].dtype
    kind = _scale_dtype(layout)
    return Quantized(
        data.view(dtype),
        scale.view(kind),
        transposed.view(dtype),
        transposed_scale.view(kind),
        _empty(x),
    )


def dequantize_blocks(
    data: Tensor,
    scale: Tensor,
    *,
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Tensor:
    """Return `scale data` [m, n] in `dtype` from the result of `quantize_blocks`; `ValueError`
    where shapes do not fit.
    """
    _require_layout(layout)
    rows, columns, _ = LAYOUTS[layout]
    if data.ndim == 2:
        wanted = (ceil_div(data.shape[0], rows), ceil_div(data.shape[1], columns))
    else:
        wanted = None
    format = next((name for name, f in FORMATS.items() if f.dtype == data.dtype), None)
    if (
        scale.shape != wanted
        or scale.dtype != _scale_dtype(layout)
        or format is None
        or dtype not in FLOATS
    ):
        raise ValueError(
            f"{layout}: scale {tuple(scale.shape)} of {tuple(data.shape)} {data.dtype} to {dtype}"
        )
    backend = pick("quantize", impl, data.device, _obstacle(data))
    return _dequantize(_bytes(data), _bytes(scale), format, layout, dtype, backend)


def quantize_nvfp4(x: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to NVFP4: codes [m, n / 2] uint8 (even columns in low halves), scales of blocks [m,
    ceil(n / 16)] e4m3, scale [1].

    `x` [..., n] in fp32, fp16 or bf16, taken as [m, n], n even. Raises `ValueError` where it does
    not fit. A block with a NaN has the scale NaN. Definition: `reference.quantize_nvfp4`.
    """
    rows = _rows(x, "e4m3", False)
    if rows.shape[1] % 2:
        raise ValueError(f"NVFP4 holds two numbers a byte: {rows.shape[1]} columns are odd")
    packed, block_scale, scale = _nvfp4(rows, pick("quantize", impl, x.device, _obstacle(rows)))
    return packed, block_scale.view(torch.float8_e4m3fn), scale


def dequantize_nvfp4(
    packed: Tensor,
    block_scale: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Tensor:
    """Return the numbers [m, n] in `dtype` from what `quantize_nvfp4` gave; raises `ValueError`
    where shapes do not fit.
    """
    fits = packed.ndim == 2 and block_scale.shape == (
        packed.shape[0],
        ceil_div(2 * packed.shape[1], 16),
    )
    kinds = packed.dtype, block_scale.dtype, scale.dtype
    fits = (
        fits and scale.shape == (1,) and kinds == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    )
    if not fits or dtype not in FLOATS:
        raise ValueError(
            f"packed {tuple(packed.shape)} {packed.dtype}, scales {tuple(block_scale.shape)}"
            f" {block_scale.dtype} and {tuple(scale.shape)} {scale.dtype} to {dtype}:"
            " quantize_nvfp4 gives uint8, e4m3 and fp32"
        )
    backend = pick("quantize", impl, packed.device, _obstacle(packed))
    return _nvfp4_dequantize(packed.contiguous(), _bytes(block_scale), scale, dtype, backend)


def swiglu_quantize(x: Tensor, **options: Any) -> Quantized:
    """Return silu(gate) times up of `x` [..., 2 n], quantised; `quantize_blocks` if `layout` is
    given, else tensorwise.
    """
    return (quantize_blocks if "layout" in options else quantize_tensorwise)(
        x, swiglu=True, **options
    )


def amax(x: Tensor, *, swiglu: bool = False, impl: str = "auto") -> Tensor:
    """Return the greatest finite absolute value [1] of `x` in fp32, or with `swiglu` of what is
    quantised then; else 0.
    """
    rows = _rows(x, "e4m3", swiglu)
    return _amax(rows, swiglu, pick("quantize", impl, x.device, _obstacle(rows)))


def tensor_range(
    partial: Tensor, *, format: str = "e4m3", impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the multiplier and the scale [1] of a tensor from the greatest values [n] of its
    parts, in fp32; see `reference.multiplier`.
    """
    m, scale = _range(partial, format, pick("quantize", impl, partial.device))
    return m, scale


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


def _scale_dtype(layout: str) -> torch.dtype:
    return torch.float8_e8m0fnu if LAYOUTS[layout].scale == "e8m0" else torch.float32


def _bytes(x: Tensor) -> Tensor:
    """Return one-byte dtypes as uint8, the operators' format: FP8 supports little arithmetic, and
    old GPUs have no FP8.
    """
    return x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()


def _require_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}; choose one of {', '.join(LAYOUTS)}")


def _rows(x: Tensor, format: str, swiglu: bool) -> Tensor:
    if format not in ("e4m3", "e5m2"):
        raise ValueError(f"no format {format!r}; choose e4m3 or e5m2")
    if x.ndim == 0 or x.dtype not in FLOATS:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} must have rows in fp32, fp16 or bf16")
    if swiglu and x.shape[-1] % 2:
        raise ValueError(f"gate and up are two halves of the last axis, x is {tuple(x.shape)}")
    x = x.detach()
    if x.numel():
        return as_rows(x, x.shape[-1])
    return x.new_empty((math.prod(x.shape[:-1]), x.shape[-1]))


def require_multiplier(multiplier: Tensor, x: Tensor) -> None:
    """Raise `ValueError` unless `multiplier` is one number in fp32 on x's device."""
    if (
        multiplier.shape != (1,)
        or multiplier.dtype != torch.float32
        or multiplier.device != x.device
    ):
        found = f"{tuple(multiplier.shape)} {multiplier.dtype} on {multiplier.device}"
        raise ValueError(f"multiplier must be [1] in fp32 on {x.device}, not {found}")


def _obstacle(rows: Tensor) -> str | None:
    """Return why the kernels do not take rows [m, n], or None: tiles of columns are the second axis
    of their grid.
    """
    most = GRID * 128
    return f"rows of {rows.shape[1]} are longer than {most}" if rows.shape[1] > most else None


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _tensorwise_shapes(x, transpose, swiglu):
    rows = x.shape[0]
    columns = x.shape[1] // (1 + swiglu)
    return (
        x.new_empty((rows, columns), dtype=torch.uint8),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty((columns, rows) if transpose else (0, 0), dtype=torch.uint8),
        x.new_empty(1, dtype=torch.float32),
    )


@operator("quantize_tensorwise", shapes=_tensorwise_shapes)
def _tensorwise(
    x: Tensor, multiplier: Tensor | None, format: str, transpose: bool, swiglu: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend == "reference":
        found = reference.quantize_tensorwise(
            _swiglu(x) if swiglu else x, multiplier, format, transpose
        )
        return tuple(map(_bytes, found))  # type: ignore[return-value]
    from mtrain_kernels.quantize import triton

    return triton.quantize_tensorwise(x, multiplier, format, transpose, swiglu)


def _blocks_shapes(x, layout, transpose, swiglu):
    m = x.shape[0]
    n = x.shape[1] // (1 + swiglu)
    rows, columns, kind = LAYOUTS[layout]
    scale = torch.uint8 if kind == "e8m0" else torch.float32
    return (
        x.new_empty((m, n), dtype=torch.uint8),
        x.new_empty((-(-m // rows), -(-n // columns)), dtype=scale),
        x.new_empty((n, m) if transpose else (0, 0), dtype=torch.uint8),
        x.new_empty((-(-n // rows), -(-m // columns)) if transpose else (0, 0), dtype=scale),
    )


@operator("quantize_blocks", shapes=_blocks_shapes)
def _blocks(
    x: Tensor, format: str, layout: str, transpose: bool, swiglu: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend == "reference":
        found = reference.quantize_blocks(_swiglu(x) if swiglu else x, format, layout, transpose)
        return tuple(map(_bytes, found))  # type: ignore[return-value]
    from mtrain_kernels.quantize import triton

    return triton.quantize_blocks(x, format, layout, transpose, swiglu)


@operator("dequantize_blocks", shapes=lambda data, dtype: data.new_empty(data.shape, dtype=dtype))
def _dequantize(
    data: Tensor, scale: Tensor, format: str, layout: str, dtype: torch.dtype, backend: str
) -> Tensor:
    if backend == "reference":
        kind = _scale_dtype(layout)
        return reference.dequantize_blocks(
            data.view(FORMATS[format].dtype),  # type: ignore[arg-type]
            scale.view(kind),
            layout,
            dtype,
        )
    from mtrain_kernels.quantize import triton

    return triton.dequantize_blocks(data, scale, format, layout, dtype)


def _nvfp4_shapes(x):
    m, n = x.shape
    return (
        x.new_empty((m, n // 2), dtype=torch.uint8),
        x.new_empty((m, -(-n // 16)), dtype=torch.uint8),
        x.new_empty(1, dtype=torch.float32),
    )


@operator("quantize_nvfp4", shapes=_nvfp4_shapes)
def _nvfp4(x: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "reference":
        return tuple(map(_bytes, reference.quantize_nvfp4(x)))  # type: ignore[return-value]
    from mtrain_kernels.quantize import nvfp4_triton

    return nvfp4_triton.quantize_nvfp4(x)


@operator(
    "dequantize_nvfp4",
    shapes=lambda packed, dtype: packed.new_empty(
        (packed.shape[0], 2 * packed.shape[1]), dtype=dtype
    ),
)
def _nvfp4_dequantize(
    packed: Tensor, block_scale: Tensor, scale: Tensor, dtype: torch.dtype, backend: str
) -> Tensor:
    if backend == "reference":
        return reference.dequantize_nvfp4(
            packed, block_scale.view(torch.float8_e4m3fn), scale, dtype
        )
    from mtrain_kernels.quantize import nvfp4_triton

    return nvfp4_triton.dequantize_nvfp4(packed, block_scale, scale, dtype)


@operator("quantize_range", shapes=lambda partial: (partial.new_empty(1), partial.new_empty(1)))
def _range(partial: Tensor, format: str, backend: str) -> tuple[Tensor, Tensor]:
    if backend == "reference":
        m = reference.multiplier(partial.amax(0, keepdim=True), format)
        return m, 1 / m
    from mtrain_kernels.quantize import triton

    return triton.range_of(partial, format)[1:]


@operator("amax", shapes=lambda x: x.new_empty(1, dtype=torch.float32))
def _amax(x: Tensor, swiglu: bool, backend: str) -> Tensor:
    if backend == "reference":
        return reference.finite_amax(_swiglu(x) if swiglu else x).view(1)
    from mtrain_kernels.quantize import triton

    return triton.amax(x, swiglu)


def _launch(model: Model) -> None:
    from mtrain_kernels.quantize import nvfp4_triton, triton

    x = torch.empty((model.tokens, model.hidden), dtype=torch.bfloat16, device="meta")
    triton.quantize_tensorwise(x, None, "e5m2", True, True)
    for layout in ("1x128", "128x128", "mx"):
        q, scale, _, _ = triton.quantize_blocks(x, "e4m3", layout, True, layout == "mx")
    triton.dequantize_blocks(q, scale, "e4m3", "mx", torch.bfloat16)
    triton.quantize_blocks(x, "e4m3", "1x128_power_of_two", True, True)
    nvfp4_triton.dequantize_nvfp4(*nvfp4_triton.quantize_nvfp4(x), torch.bfloat16)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn((model.tokens, model.hidden), device=device, dtype=dtype)}


def _case(name: str, call: Any, bytes_per_element: float, reads_twice: bool = False) -> Case:
    total = bytes_per_element + 2 * reads_twice
    return Case(
        name,
        _make,
        call,
        forward=lambda model: Cost(bytes=int(total * model.tokens * model.hidden)),
    )


OPS = (
    Op(
        "quantize",
        cases=(
            _case(
                "tensorwise",
                lambda i, c: quantize_tensorwise(**i, transpose=True, impl=c),
                4,
                reads_twice=True,
            ),
            _case("1x128", lambda i, c: quantize_blocks(**i, transpose=True, impl=c), 4 + 8 / 128),
            _case(
                "128x128",
                lambda i, c: quantize_blocks(**i, layout="128x128", transpose=True, impl=c),
                4,
            ),
            _case(
                "mxfp8",
                lambda i, c: quantize_blocks(**i, layout="mx", transpose=True, impl=c),
                4 + 2 / 32,
            ),
            _case(
                "nvfp4", lambda i, c: quantize_nvfp4(**i, impl=c), 2.5 + 1 / 16, reads_twice=True
            ),
            _case(
                "swiglu_1x128",
                lambda i, c: swiglu_quantize(**i, layout="1x128", impl=c),
                2.5 + 2 / 128,
            ),
        ),
        launch=_launch,
    ),
)
