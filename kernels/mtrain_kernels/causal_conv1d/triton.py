"""Kernels of the causal convolution: a thread reads runs of eight times, and taps are registers of
two runs.
"""

# Triton's tuples grow in loops that it unrolls.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_kernels.launch_triton import kernel
from mtrain_kernels.runtime import cast, ceil_div, on_device_of, power_of_two, sigmoid

RUN = 8  # times in a row that a thread holds, 16 bytes of half precision; no convolution is wider
TIMES = 512  # times in a tile
ELEMENTS = 2048  # values in a tile, half of it in the backward, which holds three runs of each


@triton.jit
def _runs(x, D: tl.constexpr, R: tl.constexpr):
    """Return eight tensors [D, R]: the first of each run of eight in `x` [D, 8 R], the second, and
    so on.
    """
    even, odd = tl.split(tl.reshape(x, (D, R, 4, 2)))
    even_low, even_high = tl.split(tl.reshape(even, (D, R, 2, 2)))
    odd_low, odd_high = tl.split(tl.reshape(odd, (D, R, 2, 2)))
    x0, x4 = tl.split(even_low)
    x2, x6 = tl.split(even_high)
    x1, x5 = tl.split(odd_low)
    x3, x7 = tl.split(odd_high)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _joined(x, D: tl.constexpr, R: tl.constexpr):
    """Join the runs that `_runs` cut, [D, 8 R]."""
    even = tl.reshape(tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6])), (D, R, 4))
    odd = tl.reshape(tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7])), (D, R, 4))
    return tl.reshape(tl.join(even, odd), (D, 8 * R))


@triton.jit
def _load(x_ptr, row, time, live, times, D: tl.constexpr, R: tl.constexpr):
    """Load the runs at `time`, zero before the beginning and after the end."""
    x = tl.load(x_ptr + row + time, mask=live & (time >= 0) & (time < times), other=0)
    return _runs(tl.broadcast_to(x, (D, 8 * R)), D, R)


@triton.jit
def _tap(x, segments, at: tl.constexpr, j: tl.constexpr, SEGMENTED: tl.constexpr):
    """Return the values j times before those at place `at`, zero in another segment."""
    value = x[at - j].to(tl.float32)
    if SEGMENTED and j > 0:
        value = tl.where(segments[at - j] == segments[at], value, 0.0)
    return value


@triton.jit
def _sum(
    x, segments, weights, bias, at: tl.constexpr, WIDTH: tl.constexpr, SEGMENTED: tl.constexpr
):
    """Return the output at place `at` before the activation."""
    z = bias + weights[0] * _tap(x, segments, at, 0, SEGMENTED)
    for j in tl.static_range(1, WIDTH):
        z += weights[j] * _tap(x, segments, at, j, SEGMENTED)
    return z


@triton.jit
def _slope(z):
    """Return the derivative of SiLU."""
    s = sigmoid(z)
    return s * (1 + z * (1 - s))


@triton.jit
def _tile_of(times, channels, D: tl.constexpr, T: tl.constexpr):
    """Return this program's sequence, block of times, channels [D, 1], first of their rows, and
    times [1, T].
    """
    blocks_t = tl.cdiv(times, T)
    blocks_d = tl.cdiv(channels, D)
    pid = tl.program_id(0)
    batch = (pid // (blocks_t * blocks_d)).to(tl.int64)
    channel = (pid // blocks_t % blocks_d) * D + tl.arange(0, D)[:, None]
    time = (pid % blocks_t) * T + tl.arange(0, T)[None, :]
    return batch, pid % blocks_t, channel, (batch * channels + channel) * times, time


@triton.jit
def _parameters(weight_ptr, bias_ptr, channel, live, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Load the weights of the taps, the latest first, and the bias, each [D, 1]."""
    weights = ()
    for j in tl.static_range(WIDTH):
        w = tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - j), mask=live, other=0.0).to(
            tl.float32
        )
        weights = weights + (w,)  # noqa: RUF005 - Triton unpacks no tuple here
    bias = tl.zeros_like(weights[0])
    if BIAS:
        bias += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
    return weights, bias


@kernel
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
    """Convolve D channels and T times of one sequence; a thread takes its runs from the run before
    and its own.
    """
    R: tl.constexpr = T // 8
    batch, _, channel, row, time = _tile_of(times, channels, D, T)
    live = channel < channels
    weights, bias = _parameters(weight_ptr, bias_ptr, channel, live, WIDTH, BIAS)
    # Two runs in one tuple: a tap at an offset is another register instead of another load.
    x = _load(x_ptr, row, time - 8, live, times, D, R) + _load(x_ptr, row, time, live, times, D, R)
    # A placeholder of the right structure, which nobody reads without segments.
    segments = x
    if SEGMENTED:
        at = batch * times
        segments = _load(segments_ptr, at, time - 8, True, times, 1, R) + _load(
            segments_ptr, at, time, True, times, 1, R
        )
    y = ()
    for e in tl.static_range(8):
        z = _sum(x, segments, weights, bias, 8 + e, WIDTH, SEGMENTED)
        if SILU:
            z = z * sigmoid(z)
        y = y + (z,)  # noqa: RUF005
    tl.store(
        y_ptr + row + time,
        cast(_joined(y, D, R), y_ptr.dtype.element_ty),
        mask=live & (time < times),
    )


@kernel
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
    """Compute the gradient of x, and the tile's share of the gradients of weight and bias:
    partial[tile, channel, WIDTH + 1].

    The input of the activation is recomputed rather than stored, for the run and the rows after it.
    """
    R: tl.constexpr = T // 8
    batch, block, channel, row, time = _tile_of(times, channels, D, T)
    live = channel < channels
    weights, bias = _parameters(weight_ptr, bias_ptr, channel, live, WIDTH, BIAS)
    x = _load(x_ptr, row, time - 8, live, times, D, R) + _load(x_ptr, row, time, live, times, D, R)
    d_y = _load(d_y_ptr, row, time, live, times, D, R)
    segments = x
    if SEGMENTED:
        at = batch * times
        segments = _load(segments_ptr, at, time - 8, True, times, 1, R) + _load(
            segments_ptr, at, time, True, times, 1, R
        )
    if WIDTH > 1:
        # Outputs of the next run read this one, so their gradients flow back to it.
        x = x + _load(x_ptr, row, time + 8, live, times, D, R)
        d_y = d_y + _load(d_y_ptr, row, time + 8, live, times, D, R)
        if SEGMENTED:
            segments = segments + _load(segments_ptr, batch * times, time + 8, True, times, 1, R)
    first = block * T + 8 * tl.arange(0, R)[None, :]
    d_z = ()
    for e in tl.static_range(8 + WIDTH - 1):
        d = d_y[e].to(tl.float32)
        if SILU:
            z = _sum(x, segments, weights, bias, 8 + e, WIDTH, SEGMENTED)
            d = tl.where(first + e < times, d * _slope(z), 0.0)
        d_z = d_z + (d,)  # noqa: RUF005
    # Each tile has sums of its own, added up afterwards in a fixed order: no atomics.
    to = partial_ptr + ((batch * tl.cdiv(times, T) + block) * channels + channel) * (WIDTH + 1)
    share = d_z[0]
    for e in tl.static_range(1, 8):
        share += d_z[e]
    tl.store(to + WIDTH, tl.sum(share, 1)[:, None], mask=live)
    for j in tl.static_range(WIDTH):
        share = tl.zeros([D, R], tl.float32)
        for e in tl.static_range(8):
            share += d_z[e] * _tap(x, segments, 8 + e, j, SEGMENTED)
        tl.store(to + (WIDTH - 1 - j), tl.sum(share, 1)[:, None], mask=live)
    d_x = ()
    for e in tl.static_range(8):
        total = weights[0] * d_z[e]
        for ahead in tl.static_range(1, WIDTH):
            d = d_z[e + ahead]
            if SEGMENTED:
                d = tl.where(segments[8 + e] == segments[8 + e + ahead], d, 0.0)
            total += weights[ahead] * d
        d_x = d_x + (total,)  # noqa: RUF005
    tl.store(
        d_x_ptr + row + time,
        cast(_joined(d_x, D, R), d_x_ptr.dtype.element_ty),
        mask=live & (time < times),
    )


def _tile(times: int, elements: int) -> tuple[int, int]:
    t = min(max(power_of_two(times), RUN), TIMES)
    return max(1, min(elements // t, 64)), t


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None, silu: bool
) -> Tensor:
    """Return the convolution of `x` [b, d, t] with `weight` [d, w]."""
    x, weight, bias, segments = (
        None if v is None else v.contiguous() for v in (x, weight, bias, segments)
    )  # type: ignore[assignment]
    batch, channels, times = x.shape
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    d, t = _tile(times, ELEMENTS)
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
    """Return gradients of x, weight and bias, that of the bias in fp32 and also where there is
    none.
    """
    d_y = d_y.contiguous()
    x, weight, bias, segments = (
        None if v is None else v.contiguous() for v in (x, weight, bias, segments)
    )  # type: ignore[assignment]
    batch, channels, times = x.shape
    width = weight.shape[1]
    d_x = torch.empty_like(x)
    if x.numel() == 0:
        return d_x, torch.zeros_like(weight), x.new_zeros(channels, dtype=torch.float32)
    d, t = _tile(times, ELEMENTS // 2)
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
    # The copy: results of an operator must not share memory, and slices of one sum would.
    return d_x, total[:, :width].to(weight.dtype), total[:, width].clone()
