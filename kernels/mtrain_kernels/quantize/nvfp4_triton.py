"""NVFP4 on a GPU: two codes a byte, a scale for 16 numbers, one for the tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.quantize.reference import NVFP4_SPAN, span
from mtrain_kernels.quantize.triton import SIDE, amax, decode, encode, greatest_finite
from mtrain_kernels.runtime import cast, ceil_div, on_device_of


@triton.jit
def nvfp4_kernel(x_ptr, top_ptr, packed_ptr, scale_ptr, rows, columns, stride, SIDE: tl.constexpr):
    """A tile: scales of its blocks first rounded to e4m3, then the numbers multiplied by what they say."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)[:, None]
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(top_ptr)
    blocks = tl.reshape(x, (SIDE, SIDE // 16, 16))
    code = encode(greatest_finite(blocks, 2) * (1.0 / 6.0) * top, 3, 7, 448.0)
    decoded = decode(code, 3, 7)
    m = tl.where(decoded > 0, tl.div_rn(decoded * 0.0 + top, decoded), 0.0)
    code = tl.where(tl.max(tl.where(blocks != blocks, 1, 0), axis=2) > 0, 0x7F, code).to(tl.uint8)
    block = tl.program_id(1) * (SIDE // 16) + tl.arange(0, SIDE // 16)[None, :]
    width = tl.cdiv(columns, 16)
    tl.store(scale_ptr + row.to(tl.int64) * width + block, code, mask=(row < rows) & (block < width))
    low, high = tl.split(tl.reshape(encode(blocks * m[:, :, None], 1, 1, 6.0), (SIDE, SIDE // 2, 2)))
    pair = tl.program_id(1) * (SIDE // 2) + tl.arange(0, SIDE // 2)[None, :]
    at = packed_ptr + row.to(tl.int64) * (columns // 2) + pair
    tl.store(at, low | (high << 4), mask=(row < rows) & (pair < columns // 2))


@triton.jit
def nvfp4_dequantize_kernel(packed_ptr, scale_ptr, tensor_scale_ptr, out_ptr, rows, columns, SIDE: tl.constexpr):
    """A tile of numbers from pairs of codes."""
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
    """Launches the kernels for amax and NVFP4; `x` [m, n] with unit column stride and even n; see the reference."""
    rows, columns = x.shape
    grid = (ceil_div(rows, SIDE), ceil_div(columns, SIDE))
    packed = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = x.new_empty((rows, ceil_div(columns, 16)), dtype=torch.uint8)
    top = span(amax(x, False), NVFP4_SPAN)
    if x.numel():
        with on_device_of(x):
            nvfp4_kernel[grid](x, top, packed, scale, rows, columns, x.stride(0), SIDE=SIDE, num_warps=16)
    return packed, scale, 1 / top


def dequantize_nvfp4(packed: Tensor, block_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Launches the kernel that turns NVFP4 codes back into numbers; see the reference."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = packed.new_empty((rows, columns), dtype=dtype)
    if packed.numel():
        with on_device_of(packed):
            nvfp4_dequantize_kernel[(ceil_div(rows, SIDE), ceil_div(columns, SIDE))](
                packed, block_scale, scale, out, rows, columns, SIDE=SIDE, num_warps=16
            )
    return out
