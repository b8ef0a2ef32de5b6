"""Quantisation on a GPU: bits are the same on every target and in the interpreter, whoever rounds
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.quantize import reference
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS, PTX_DECODE, PTX_ENCODE
from mtrain_kernels.quantize.tile_triton import dealt, in_order
from mtrain_kernels.runtime import (
    INTERPRETED,
    cast,
    ceil_div,
    converts_fp8,
    on_device_of,
    quotient,
    rounded,
    sigmoid,
)

SIDE = 128  # of a square tile
RANGE_BLOCK = 1024  # greatest values of tiles that are reduced at a time
GREATEST_MULTIPLIER = tl.constexpr(reference.GREATEST_MULTIPLIER)
TO_E4M3 = tl.constexpr(PTX_ENCODE)
TO_E5M2 = tl.constexpr(PTX_ENCODE.replace("e4m3", "e5m2"))
FROM_E4M3 = tl.constexpr(PTX_DECODE)
FROM_E5M2 = tl.constexpr(PTX_DECODE.replace("e4m3", "e5m2"))


@triton.jit
def encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, GREATEST: tl.constexpr):
    """Return the code of fp32 `x` in uint8, by the GPU's own conversion where it has one, which
    gives the same bits.
    """
    if converts_fp8():
        CONVERT: tl.constexpr = TO_E4M3 if MANTISSA == 3 else TO_E5M2
        code = tl.inline_asm_elementwise(
            CONVERT, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        code = encode_bits(x, MANTISSA, BIAS, GREATEST)
    return code


@triton.jit
def decode(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the fp32 number of a code in uint8, by the GPU's own conversion where it has one."""
    if MANTISSA > 1 and converts_fp8():
        CONVERT: tl.constexpr = FROM_E4M3 if MANTISSA == 3 else FROM_E5M2
        value = tl.inline_asm_elementwise(
            CONVERT, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        value = decode_bits(code.to(tl.int32), MANTISSA, BIAS)
    return value


@triton.jit
def encode_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, GREATEST: tl.constexpr):
    """Return the code of fp32 `x` in uint8: nearest, ties to even, saturating; NaN is all ones.

    Below the normal numbers, adding a power of two leaves the multiple of the smallest number in
    the last bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    nan = x != x
    magnitude = tl.minimum(tl.abs(x), GREATEST)
    big = magnitude.to(tl.int32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MANTISSA
    # Half of the last kept bit is added, less one unless that bit is odd: ties go to even.
    normal = ((big + ((1 << (DROPPED - 1)) - 1) + ((big >> DROPPED) & 1)) >> DROPPED) - (
        (127 - BIAS) << MANTISSA
    )
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    tiny = (magnitude + MAGIC).to(tl.int32, bitcast=True) - ((24 - BIAS - MANTISSA + 127) << 23)
    code = tl.where(magnitude >= 2.0 ** (1 - BIAS), normal, tiny)
    code = tl.where(bits < 0, code | 0x80, code)
    return tl.where(nan, 0x7F, code).to(tl.uint8)


@triton.jit
def decode_bits(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the fp32 number of a code in int32; multiplying by a power of two makes subnormal
    codes normal.
    """
    SIGN: tl.constexpr = 1 << (3 if MANTISSA == 1 else 7)
    magnitude = code & (SIGN - 1)
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    if MANTISSA == 2:
        value = tl.where(
            magnitude == 0x7C, float("inf"), tl.where(magnitude > 0x7C, float("nan"), value)
        )
    return tl.where(code >= SIGN, -value, value)


@triton.jit
def finite(x):
    """Return the absolute value, 0 where it is infinite or not a number."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def greatest_finite(x, axis: tl.constexpr):
    """Return the greatest finite absolute value along an axis, 0 where no number is finite.

    On a GPU x + 0 x makes infinities not a number, which a maximum leaves out: two instructions and
    not three.
    """
    if INTERPRETED:
        return tl.max(finite(x), axis)
    return tl.maximum(tl.max(tl.abs(tl.fma(x, tl.zeros_like(x), x)), axis), 0.0)


@triton.jit
def multiplier(amax, GREATEST: tl.constexpr):
    """Return `GREATEST / amax`, at most 2^126, and 1 for an amax of 0; the division is exact to the
    last bit.
    """
    # Below this amax the multiplier would exceed 2^126.
    least = tl.maximum(amax, GREATEST / GREATEST_MULTIPLIER)
    return tl.where(amax > 0, quotient(amax * 0.0 + GREATEST, least), 1.0)


@triton.jit
def scales(amax, GREATEST: tl.constexpr, EMAX: tl.constexpr, SCALE: tl.constexpr):
    """Return multiplier in fp32, and the scale as it is stored: fp32, or for "e8m0" its exponent in
    uint8.
    """
    bits = amax.to(tl.int32, bitcast=True)
    above = tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # both formats end at 1.75 * 2^EMAX
    if SCALE == "e8m0":
        exponent = tl.maximum((bits >> 23) - EMAX + above, 0)
        m = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = exponent.to(tl.uint8)
    elif SCALE == "power_of_two":
        # 253 stands for 2^126, whose reciprocal is still a normal number.
        exponent = tl.minimum(254 + EMAX - (bits >> 23) - above, 253)
        exponent = tl.where(amax > 0, exponent, 127)
        m = (exponent << 23).to(tl.float32, bitcast=True)
        scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        m = multiplier(amax, GREATEST)
        scale = quotient(m * 0.0 + 1.0, m)
    return m, scale


@triton.jit
def load_tile(x_ptr, row, column, rows, columns, stride, SWIGLU: tl.constexpr):
    """Load a tile in fp32, 0 outside; with `SWIGLU` silu(gate) times up of the halves, rounded to
    the input's dtype.
    """
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = x_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x * sigmoid(x) * up, x_ptr.dtype.element_ty)  # as `activation.triton`
    return x


@kernel
def amax_kernel(x_ptr, out_ptr, rows, columns, stride, SWIGLU: tl.constexpr, SIDE: tl.constexpr):
    """Reduce the greatest finite absolute value of each tile; torch takes the greatest of all."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x = load_tile(x_ptr, row, column, rows, columns, stride, SWIGLU)
    tl.store(
        out_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
        tl.max(greatest_finite(x, 1), 0),
    )


@kernel
def range_kernel(
    partial_ptr, amax_ptr, multiplier_ptr, scale_ptr, count,
    GREATEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce `count` greatest values to one, and make the multiplier and the scale of that."""
    at = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        inside = start + at < count
        top = tl.maximum(top, tl.load(partial_ptr + start + at, mask=inside, other=0.0))
    amax = tl.max(top, 0)
    m = multiplier(amax, GREATEST)
    tl.store(amax_ptr, amax)
    tl.store(multiplier_ptr, m)
    tl.store(scale_ptr, quotient(m * 0.0 + 1.0, m))


@kernel
def tensorwise_kernel(
    x_ptr,
    multiplier_ptr,
    q_ptr,
    transposed_ptr,
    amax_ptr,
    rows,
    columns,
    stride,
    SWIGLU: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    AMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    GREATEST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Quantise a tile with the tensor's one multiplier, twice where the transpose is wanted, and
    reduce its `AMAX` on the way.
    """
    RUN: tl.constexpr = 4 if TRANSPOSE else 1
    # bytes written at once: 16 would be 16 columns to reduce
    WIDE: tl.constexpr = 8 if TRANSPOSE else 16
    row = tl.program_id(0) * SIDE + dealt(SIDE, RUN)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = load_tile(x_ptr, row, column, rows, columns, stride, SWIGLU)
    if AMAX:
        tl.store(
            amax_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
            tl.max(greatest_finite(x, 1), 0),
        )
    q = encode(x * tl.load(multiplier_ptr), MANTISSA, BIAS, GREATEST)
    tl.store(
        q_ptr + row[:, None].to(tl.int64) * columns + tl.max_contiguous(column, WIDE)[None, :],
        q,
        mask=inside,
    )
    if TRANSPOSE:
        row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
        at = (
            transposed_ptr
            + column[:, None].to(tl.int64) * rows
            + tl.max_contiguous(row, WIDE)[None, :]
        )
        inside = (column[:, None] < columns) & (row[None, :] < rows)
        tl.store(at, tl.trans(in_order(q, SIDE, RUN)), mask=inside)


@triton.jit
def groups(
    x,
    DOWN: tl.constexpr,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    GREATEST: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Return codes of a tile in groups along its rows, or `DOWN` its columns, and the scale of each
    group.
    """
    COUNT: tl.constexpr = SIDE // GROUP
    EMAX: tl.constexpr = 8 if MANTISSA == 3 else 15
    if DOWN:
        cut = tl.reshape(x, (COUNT, GROUP, SIDE))
        m, scale = scales(greatest_finite(cut, 1), GREATEST, EMAX, SCALE)
        scaled = tl.reshape(cut * m[:, None, :], (SIDE, SIDE))
    else:
        cut = tl.reshape(x, (SIDE, COUNT, GROUP))
        m, scale = scales(greatest_finite(cut, 2), GREATEST, EMAX, SCALE)
        scaled = tl.reshape(cut * m[:, :, None], (SIDE, SIDE))
    return encode(scaled, MANTISSA, BIAS, GREATEST), scale


@kernel
def blocks_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    transposed_ptr,
    transposed_scale_ptr,
    rows,
    columns,
    stride,
    SWIGLU: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    SQUARE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    GREATEST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Quantise a tile with a scale for all of it (`SQUARE`) or for each `GROUP` of a row, and,
    transposed, of a column.
    """
    if TRANSPOSE:
        RUN: tl.constexpr = 4 if SQUARE or GROUP < SIDE else 8
    else:
        RUN: tl.constexpr = 1  # type: ignore[no-redef]
    # bytes written at once: 16 would be 16 columns to reduce
    WIDE: tl.constexpr = 8 if TRANSPOSE and not SQUARE else 16
    row = tl.program_id(0) * SIDE + dealt(SIDE, RUN)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    q_at = q_ptr + row[:, None].to(tl.int64) * columns + tl.max_contiguous(column, WIDE)[None, :]
    x = load_tile(x_ptr, row, column, rows, columns, stride, SWIGLU)
    if SQUARE:
        EMAX: tl.constexpr = 8 if MANTISSA == 3 else 15
        m, scale = scales(tl.max(greatest_finite(x, 1), 0), GREATEST, EMAX, SCALE)
        q = encode(x * m, MANTISSA, BIAS, GREATEST)
        tl.store(q_at, q, mask=inside)
        tl.store(scale_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
        if TRANSPOSE:
            tl.store(
                transposed_scale_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
                scale,
            )
    else:
        GROUPS: tl.constexpr = SIDE // GROUP
        q, scale = groups(x, False, SIDE, GROUP, MANTISSA, BIAS, GREATEST, SCALE)
        tl.store(q_at, q, mask=inside)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        width = tl.cdiv(columns, GROUP)
        kept = (row[:, None] < rows) & (group[None, :] < width)
        tl.store(scale_ptr + row[:, None] * width + group[None, :], scale, mask=kept)
        if TRANSPOSE:
            q, scale = groups(
                in_order(x, SIDE, RUN), True, SIDE, GROUP, MANTISSA, BIAS, GREATEST, SCALE
            )
            group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
            width = tl.cdiv(rows, GROUP)
            kept = (column[None, :] < columns) & (group[:, None] < width)
            tl.store(
                transposed_scale_ptr + column[None, :] * width + group[:, None], scale, mask=kept
            )
    if TRANSPOSE:
        if SQUARE:
            q = in_order(q, SIDE, RUN)
        row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
        transposed_at = (
            transposed_ptr
            + column[:, None].to(tl.int64) * rows
            + tl.max_contiguous(row, WIDE)[None, :]
        )
        tl.store(
            transposed_at, tl.trans(q), mask=(column[:, None] < columns) & (row[None, :] < rows)
        )


@kernel
def dequantize_kernel(
    q_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    E8M0: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Dequantise a tile from codes and the scales of their blocks."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    value = decode(tl.load(q_ptr + at, mask=inside, other=0), MANTISSA, BIAS)
    width = tl.cdiv(columns, BLOCK_COLUMNS)
    scale_at = scale_ptr + (row[:, None] // BLOCK_ROWS) * width + column[None, :] // BLOCK_COLUMNS
    scale = tl.load(scale_at, mask=inside, other=0)
    if E8M0:
        exponent = scale.to(tl.int32)
        # Exponent 0 is 2^-127, a subnormal number in fp32; shifting would give 0.
        scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent == 255, float("nan"), scale)
    tl.store(out_ptr + at, cast(value * scale, out_ptr.dtype.element_ty), mask=inside)


def amax(x: Tensor, swiglu: bool) -> Tensor:
    """Launch the kernel for amax [1]; `x` as in `quantize_tensorwise`."""
    return _of_tiles(x, swiglu).amax(0, keepdim=True)


def _of_tiles(x: Tensor, swiglu: bool) -> Tensor:
    """Launch the kernel for the greatest values of all tiles; without elements one of 0."""
    rows = x.shape[0]
    columns = x.shape[1] // (1 + swiglu)
    grid = (ceil_div(rows, SIDE), ceil_div(columns, SIDE))
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    partial = x.new_empty(grid[0] * grid[1], dtype=torch.float32)
    with on_device_of(x):
        amax_kernel[grid](
            x, partial, rows, columns, x.stride(0), SWIGLU=swiglu, SIDE=SIDE, num_warps=8
        )
    return partial


def range_of(partial: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel that makes one range of the greatest values of parts [n] in fp32: that of
    all, its multiplier and its scale [1] each.
    """
    found, m, scale = (partial.new_empty(1) for _ in range(3))
    with on_device_of(partial):
        range_kernel[(1,)](
            partial, found, m, scale, partial.shape[0],
            GREATEST=FORMATS[format].greatest, BLOCK=RANGE_BLOCK, num_warps=4,
        )  # fmt: skip
    return found, m, scale


def quantize_tensorwise(
    x: Tensor, m: Tensor | None, format: str, transpose: bool, swiglu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reference's results as bytes: launches the tensorwise kernel, after those for the
    range unless `m` [1] is given.

    `x` [m, n] with unit column stride, or with `swiglu` [m, 2 n], gate and up side by side.
    """
    rows = x.shape[0]
    columns = x.shape[1] // (1 + swiglu)
    mantissa, bias, greatest, _ = FORMATS[format]
    grid = (ceil_div(rows, SIDE), ceil_div(columns, SIDE))
    given = m is not None
    if m is None:
        found, m, scale = range_of(_of_tiles(x, swiglu), format)
        partial = found
    else:
        scale = 1 / m
        partial = x.new_zeros(max(1, grid[0] * grid[1]), dtype=torch.float32)
    q = x.new_empty((rows, columns), dtype=torch.uint8)
    transposed = x.new_empty((columns, rows) if transpose else (0, 0), dtype=torch.uint8)
    with on_device_of(x):
        if q.numel():
            tensorwise_kernel[grid](
                x,
                m,
                q,
                transposed,
                partial,
                rows,
                columns,
                x.stride(0),
                SWIGLU=swiglu,
                TRANSPOSE=transpose,
                AMAX=given,
                MANTISSA=mantissa,
                BIAS=bias,
                GREATEST=greatest,
                SIDE=SIDE,
                num_warps=16,
            )
    return q, scale, transposed, partial.amax(0, keepdim=True) if given else partial


def quantize_blocks(
    x: Tensor, format: str, layout: str, transpose: bool, swiglu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reference's results as bytes: launches the kernel for blocks; `x` as in
    `quantize_tensorwise`.
    """
    rows = x.shape[0]
    columns = x.shape[1] // (1 + swiglu)
    mantissa, bias, greatest, _ = FORMATS[format]
    block_rows, group, scale_kind = LAYOUTS[layout]
    q = x.new_empty((rows, columns), dtype=torch.uint8)
    scale = x.new_empty(
        (ceil_div(rows, block_rows), ceil_div(columns, group)), dtype=scale_dtype(layout)
    )
    transposed = x.new_empty((columns, rows) if transpose else (0, 0), dtype=torch.uint8)
    other = (ceil_div(columns, block_rows), ceil_div(rows, group)) if transpose else (0, 0)
    transposed_scale = x.new_empty(other, dtype=scale.dtype)
    if q.numel():
        with on_device_of(x):
            blocks_kernel[(ceil_div(rows, SIDE), ceil_div(columns, SIDE))](
                x,
                q,
                scale,
                transposed,
                transposed_scale,
                rows,
                columns,
                x.stride(0),
                SWIGLU=swiglu,
                TRANSPOSE=transpose,
                SQUARE=block_rows > 1,
                GROUP=group,
                SCALE=scale_kind,
                MANTISSA=mantissa,
                BIAS=bias,
                GREATEST=greatest,
                SIDE=SIDE,
                num_warps=8 if group == SIDE else 16,
            )
    return q, scale, transposed, transposed_scale


def dequantize_blocks(
    q: Tensor, scale: Tensor, format: str, layout: str, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel that turns codes back into numbers; see the reference."""
    mantissa, bias, _, _ = FORMATS[format]
    out = q.new_empty(q.shape, dtype=dtype)
    if q.numel():
        with on_device_of(q):
            dequantize_kernel[(ceil_div(q.shape[0], SIDE), ceil_div(q.shape[1], SIDE))](
                q,
                scale,
                out,
                *q.shape,
                BLOCK_ROWS=LAYOUTS[layout].rows,
                BLOCK_COLUMNS=LAYOUTS[layout].columns,
                E8M0=LAYOUTS[layout].scale == "e8m0",
                MANTISSA=mantissa,
                BIAS=bias,
                SIDE=SIDE,
                num_warps=16,
            )
    return out


def scale_dtype(layout: str) -> torch.dtype:
    """Return the format of a layout's scales: fp32, or the bytes of their exponents."""
    return torch.uint8 if LAYOUTS[layout].scale == "e8m0" else torch.float32
