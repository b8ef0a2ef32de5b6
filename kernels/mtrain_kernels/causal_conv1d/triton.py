"""Kernels of the causal convolution: taps are shifted loads of one line, which the first-level cache holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two

TIMES = 512  # times in a tile
ELEMENTS = 2048  # values in a tile


@triton.jit
def _tap(x_ptr, segments_ptr, batch, row, time, live, j, times, SEGMENTED: tl.constexpr):
    """Values [D, T] that lie j times earlier, zero before the beginning and in another segment."""
    earlier = time - j
    seen = live & (earlier >= 0) & (time < times)
    if SEGMENTED:
        here = tl.load(segments_ptr + batch * times + time, mask=seen, other=0)
        seen = seen & (tl.load(segments_ptr + batch * times + earlier, mask=seen, other=0) == here)
    return tl.load(x_ptr + row + earlier, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _slope(z):
    """The derivative of SiLU."""
    s = tl.sigmoid(z)
    return s * (1 + z * (1 - s))


@triton.jit
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    segments_ptr,
    y_ptr,
    channels,
    times,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SEGMENTED: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """D channels and T times of one sequence."""
    blocks_t, blocks_d = tl.cdiv(times, T), tl.cdiv(channels, D)
    pid = tl.program_id(0)
    batch = (pid // (blocks_t * blocks_d)).to(tl.int64)
    channel = (pid // blocks_t % blocks_d) * D + tl.arange(0, D)[:, None]
    time = (pid % blocks_t) * T + tl.arange(0, T)[None, :]
    live = channel < channels
    row = (batch * channels + channel) * times
    z = tl.zeros([D, T], tl.float32)
    if BIAS:
        z += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH):
        w = tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - j), mask=live, other=0.0).to(tl.float32)
        z += w * _tap(x_ptr, segments_ptr, batch, row, time, live, j, times, SEGMENTED)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y_ptr + row + time, cast(z, y_ptr.dtype.element_ty), mask=live & (time < times))


@triton.jit
def conv_backward_kernel(
    d_y_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    segments_ptr,
    d_x_ptr,
    partial_ptr,
    channels,
    times,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SEGMENTED: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """Gradient of x, and the tile's share of the gradients of weight and bias: partial[tile, channel, WIDTH + 1].

    What came out before the activation is computed again rather than stored; x is read from the cache each time.
    """
    blocks_t, blocks_d = tl.cdiv(times, T), tl.cdiv(channels, D)
    pid = tl.program_id(0)
    batch = (pid // (blocks_t * blocks_d)).to(tl.int64)
    channel = (pid // blocks_t % blocks_d) * D + tl.arange(0, D)[:, None]
    time = (pid % blocks_t) * T + tl.arange(0, T)[None, :]
    live = channel < channels
    row = (batch * channels + channel) * times
    tile = batch * blocks_t + pid % blocks_t
    to = partial_ptr + (tile * channels + channel) * (WIDTH + 1)
    d_x = tl.zeros([D, T], tl.float32)
    for ahead in tl.static_range(WIDTH):
        later = time + ahead
        seen = live & (later < times)
        d_z = tl.load(d_y_ptr + row + later, mask=seen, other=0.0).to(tl.float32)
        if SILU:
            z = tl.zeros([D, T], tl.float32)
            if BIAS:
                z += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
            for j in tl.static_range(WIDTH):
                w = tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - j), mask=live, other=0.0).to(tl.float32)
                z += w * _tap(x_ptr, segments_ptr, batch, row, later, live, j, times, SEGMENTED)
            d_z = tl.where(seen, d_z * _slope(z), 0.0)
        if ahead == 0:
            tl.store(to + WIDTH, tl.sum(d_z, 1)[:, None], mask=live)
            for j in tl.static_range(WIDTH):
                x = _tap(x_ptr, segments_ptr, batch, row, time, live, j, times, SEGMENTED)
                tl.store(to + (WIDTH - 1 - j), tl.sum(d_z * x, 1)[:, None], mask=live)
        if SEGMENTED:
            here = tl.load(segments_ptr + batch * times + time, mask=time < times, other=0)
            there = tl.load(segments_ptr + batch * times + later, mask=later < times, other=0)
            d_z = tl.where(here == there, d_z, 0.0)
        d_x += tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - ahead), mask=live, other=0.0).to(tl.float32) * d_z
    tl.store(d_x_ptr + row + time, cast(d_x, d_x_ptr.dtype.element_ty), mask=live & (time < times))


def _tile(times: int, width: int) -> tuple[int, int]:
    elements = ELEMENTS if width <= 4 else ELEMENTS // 2  # more taps keep more values at once, and would spill
    t = min(power_of_two(times), TIMES)
    return max(1, min(elements // t, 64)), t


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool) -> Tensor:
    """The convolution of `x` [b, d, t] with `weight` [d, w]."""
    x, weight, bias, segments = (None if v is None else v.contiguous() for v in (x, weight, bias, segments))  # type: ignore[assignment]
    batch, channels, times = x.shape
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    d, t = _tile(times, weight.shape[1])
    with on_device_of(x):
        conv_kernel[(batch * ceil_div(channels, d) * ceil_div(times, t),)](
            x,
            weight,
            bias,
            segments,
            y,
            channels,
            times,
            WIDTH=weight.shape[1],
            BIAS=bias is not None,
            SILU=silu,
            SEGMENTED=segments is not None,
            D=d,
            T=t,
            num_warps=4,
        )
    return y


def backward(
    d_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, that of the bias in fp32 and also where there is none."""
    d_y = d_y.contiguous()
    x, weight, bias, segments = (None if v is None else v.contiguous() for v in (x, weight, bias, segments))  # type: ignore[assignment]
    batch, channels, times = x.shape
    width = weight.shape[1]
    d_x = torch.empty_like(x)
    if x.numel() == 0:
        return d_x, torch.zeros_like(weight), x.new_zeros(channels, dtype=torch.float32)
    d, t = _tile(times, width)
    tiles = batch * ceil_div(times, t)
    partial = torch.empty(tiles, channels, width + 1, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        conv_backward_kernel[(tiles * ceil_div(channels, d),)](
            d_y,
            x,
            weight,
            bias,
            segments,
            d_x,
            partial,
            channels,
            times,
            WIDTH=width,
            BIAS=bias is not None,
            SILU=silu,
            SEGMENTED=segments is not None,
            D=d,
            T=t,
            num_warps=4,
        )
    total = partial.sum(0)
    return d_x, total[:, :width].to(weight.dtype), total[:, width].clone()
