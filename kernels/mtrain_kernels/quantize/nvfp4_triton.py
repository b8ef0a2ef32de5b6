"""NVFP4 on a GPU: two codes per byte, a scale per 16 numbers, and one for the tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.quantize.formats import PTX_ENCODE_E2M1, PTX_PACK
from mtrain_kernels.quantize.reference import NVFP4_SPAN, span
from mtrain_kernels.quantize.triton import SIDE, amax, decode, encode, greatest_finite
from mtrain_kernels.runtime import INTERPRETED, cast, ceil_div, converts_fp4, on_device_of

ROUND = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to an integer, kept in the last bits
CONVERT = tl.constexpr(PTX_ENCODE_E2M1)
PACK = tl.constexpr(PTX_PACK)
DIVIDE = tl.constexpr(
    "{ .reg .f32 r, q, e; rcp.approx.ftz.f32 r, $2; mul.rz.f32 q, $1, r; neg.f32 e, q;"
    " fma.rn.f32 e, e, $2, $1; fma.rn.f32 $0, e, r, q; }"
)


@triton.jit
def pairs(y):
    """Return the e2m1 codes of `y` [a, 2 n], two per byte [a, n] with the even column in the low
    bits: round to nearest, ties to even, saturating; NaN becomes the greatest number.

    The codes of numbers up to 2, 4 and 6 are 2 y, y + 2 and y / 2 + 4. The least of the three is
    the right one, and adding `ROUND` to it rounds it into the last bits of the sum.
    """
    SHAPE: tl.constexpr = (y.shape[0], y.shape[1] // 2, 2)
    if converts_fp4():
        low, high = tl.split(tl.reshape(y, SHAPE))
        both = tl.inline_asm_elementwise(
            CONVERT, "=r,f,f,f,f,f,f,f,f", [low, high], tl.uint8, True, 4
        )
    else:
        near = tl.minimum(tl.abs(y), 6.0)
        code = tl.minimum(
            near * 2.0 + ROUND, tl.minimum(near + (ROUND + 2.0), near * 0.5 + (ROUND + 4.0))
        )
        low, high = tl.split(tl.reshape(code, SHAPE))
        first, second = tl.split(tl.reshape(y, SHAPE))
        if INTERPRETED:
            both = _signed(low, first) | (_signed(high, second) << 4)
        else:
            given = [low, high, first, second]
            both = tl.inline_asm_elementwise(
                PACK, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", given, tl.uint8, True, 4
            )
    return both


@triton.jit
def _signed(code, y):
    code = code.to(tl.int32, bitcast=True) & 7
    return tl.where(y.to(tl.int32, bitcast=True) < 0, tl.where(y == y, code | 8, code), code).to(
        tl.uint8
    )


@kernel
def nvfp4_kernel(x_ptr, top_ptr, packed_ptr, scale_ptr, rows, columns, stride, SIDE: tl.constexpr):
    """Quantise a tile: round the scales of its blocks to e4m3, then multiply the numbers by them.

    A thread holds both halves of a block, so threads exchange nothing; the next thread holds the
    next block of the row.
    """
    number = tl.arange(0, SIDE * SIDE // 16)
    row = tl.program_id(0) * SIDE + number // (SIDE // 16)
    block = tl.program_id(1) * (SIDE // 16) + number % (SIDE // 16)
    column = block[:, None] * 16 + tl.arange(0, 8)[None, :]
    at = x_ptr + row.to(tl.int64)[:, None] * stride + column
    live = (row < rows)[:, None]
    left = tl.load(at, mask=live & (column < columns), other=0.0).to(tl.float32)
    right = tl.load(at + 8, mask=live & (column + 8 < columns), other=0.0).to(tl.float32)
    top = tl.load(top_ptr)
    amax = tl.maximum(greatest_finite(left, 1), greatest_finite(right, 1))
    code = encode(amax * (1.0 / 6.0) * top, 3, 7, 448.0)
    decoded = decode(code, 3, 7)
    # A scale that rounds to zero makes its whole block zeros.
    m = tl.where(decoded > 0, over_scale(decoded * 0.0 + top, decoded), 0.0)
    code = tl.where(any_nan(left, right), 0x7F, code).to(tl.uint8)
    width = tl.cdiv(columns, 16)
    tl.store(
        scale_ptr + row.to(tl.int64) * width + block, code, mask=(row < rows) & (block < width)
    )
    pair = block[:, None] * 8 + tl.arange(0, 4)[None, :]
    at = packed_ptr + row.to(tl.int64)[:, None] * (columns // 2) + pair
    tl.store(at, pairs(left * m[:, None]), mask=live & (pair < columns // 2))
    tl.store(at + 4, pairs(right * m[:, None]), mask=live & (pair + 4 < columns // 2))


@triton.jit
def over_scale(a, b):
    """Return `a / b` to the last bit, for `b` with four bits and less: so no nearer to a tie than
    1/30 of the last bit.

    A quotient that is off by some last bits, and never infinite, is corrected by its remainder,
    which is exact.
    """
    if INTERPRETED:
        return tl.div_rn(a, b)
    return tl.inline_asm_elementwise(DIVIDE, "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def any_nan(left, right):
    """Return whether a block holds a NaN."""
    if INTERPRETED:
        return tl.max(tl.where((left != left) | (right != right), 1, 0), 1) > 0
    most = _maximum(tl.reduce(tl.abs(left), 1, _maximum), tl.reduce(tl.abs(right), 1, _maximum))
    return most != most


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@kernel
def nvfp4_dequantize_kernel(
    packed_ptr, scale_ptr, tensor_scale_ptr, out_ptr, rows, columns, SIDE: tl.constexpr
):
    """Dequantise a tile of numbers from pairs of codes."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    pair = tl.program_id(1) * (SIDE // 2) + tl.arange(0, SIDE // 2)[None, :]
    inside = (row < rows) & (pair < columns // 2)
    both = tl.load(packed_ptr + row.to(tl.int64) * (columns // 2) + pair, mask=inside, other=0)
    scale_at = scale_ptr + row.to(tl.int64) * tl.cdiv(columns, 16) + pair // 8
    scale = decode(tl.load(scale_at, mask=inside, other=0), 3, 7) * tl.load(tensor_scale_ptr)
    value = tl.interleave(decode(both & 15, 1, 1) * scale, decode(both >> 4, 1, 1) * scale)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    at = out_ptr + row.to(tl.int64) * columns + column
    tl.store(at, cast(value, out_ptr.dtype.element_ty), mask=(row < rows) & (column < columns))


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for amax and NVFP4; `x` [m, n] with unit column stride and even n; see
    the reference.
    """
    rows, columns = x.shape
    grid = (ceil_div(rows, SIDE), ceil_div(columns, SIDE))
    packed = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = x.new_empty((rows, ceil_div(columns, 16)), dtype=torch.uint8)
    top = span(amax(x, False), NVFP4_SPAN)
    if x.numel():
        with on_device_of(x):
            nvfp4_kernel[grid](
                x, top, packed, scale, rows, columns, x.stride(0), SIDE=SIDE, num_warps=16
            )
    return packed, scale, 1 / top


def dequantize_nvfp4(
    packed: Tensor, block_scale: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel that turns NVFP4 codes back into numbers; see the reference."""
    rows = packed.shape[0]
    columns = 2 * packed.shape[1]
    out = packed.new_empty((rows, columns), dtype=dtype)
    if packed.numel():
        with on_device_of(packed):
            nvfp4_dequantize_kernel[(ceil_div(rows, SIDE), ceil_div(columns, SIDE))](
                packed, block_scale, scale, out, rows, columns, SIDE=SIDE, num_warps=16
            )
    return out
