"""Definition of the quantised formats, in plain torch.

`x` is quantised to `q` with a multiplier m for each part, `q = round(m x)`, and comes back as
`scale q` with `scale = 1 / m`. Rounding is to nearest, ties to even, and saturates: infinity
becomes the greatest number, and NaN stays NaN. Infinity and NaN are left out of the greatest
absolute value (amax) that m is made of, so that they spoil no other element; a part without any
amax has m = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS, Layout

GREATEST_MULTIPLIER = 2.0**126  # its reciprocal is still a normal fp32 number
NVFP4_SPAN = 448.0 * 6.0  # the greatest block scale times the greatest e2m1 number


def finite_amax(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the greatest finite absolute value of `x`, over `dim` or everything, in fp32; 0 where
    no number is finite.
    """
    magnitude = x.float().abs()
    magnitude = magnitude.where(magnitude.isfinite(), 0)
    if dim is None:
        return magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
    return magnitude.amax(dim)


def multiplier(amax: Tensor, format: str, scale: str = "fp32") -> Tensor:
    """Return the factor that brings `amax` to the greatest number of `format`; for `scale`
    "power_of_two" the power below.
    """
    m = span(amax, FORMATS[format].greatest)
    # Without its mantissa a number is the power of two below it.
    return (m.view(torch.int32) & -(1 << 23)).view(torch.float32) if scale == "power_of_two" else m


def span(amax: Tensor, greatest: float) -> Tensor:
    """Return `greatest / amax` rounded once (a number over a tensor would not be), at most 2^126; 1
    for an amax of 0.
    """
    # Filled on the device: `torch.tensor` would copy from the host, which waits for the device.
    m = torch.full((), greatest, device=amax.device) / amax
    return m.clamp(max=GREATEST_MULTIPLIER).where(amax > 0, 1.0)


def encode(x: Tensor, format: str) -> Tensor:
    """Return fp32 `x` rounded to "e4m3" or "e5m2", as a tensor of that dtype; every NaN has
    the code 0x7F.
    """
    greatest = FORMATS[format].greatest
    dtype = FORMATS[format].dtype
    code = x.clamp(-greatest, greatest).to(dtype).view(torch.uint8)
    return code.masked_fill(x.isnan(), 0x7F).view(dtype)  # type: ignore[arg-type]


def encode_e2m1(x: Tensor) -> Tensor:
    """Return fp32 `x` rounded to e2m1, as codes 0-15 in uint8; the format has no NaN, which becomes
    6.
    """
    steps = x.new_tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # half-way between neighbours
    magnitude = x.abs()
    # a tie goes down, which is right where the lower code is even
    code = torch.bucketize(magnitude, steps)
    tie_to_upper = (magnitude == steps[code.clamp(max=6)]) & (code % 2 == 1)
    code = (code + tie_to_upper).where(~x.isnan(), 7)
    return (code + 8 * (torch.signbit(x) & ~x.isnan())).to(torch.uint8)


def decode_e2m1(code: Tensor) -> Tensor:
    """Return the numbers in fp32 that e2m1 codes 0-15 stand for."""
    # The table holds twice the numbers, and the sign picks 0.5 or -0.5.
    return code.new_tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32)[(code & 7).long()] * (
        0.5 - (code >> 3).float()
    )


def quantize_tensorwise(
    x: Tensor, m: Tensor | None, format: str, transpose: bool
) -> tuple[Tensor, ...]:
    """Return one multiplier for all: data [m, n], scale [1] fp32, transposed data [n, m] or empty,
    and amax [1].

    `x` [m, n]; `m` [1] fp32, or None for the one that x's own amax asks for (current scaling).
    """
    amax = finite_amax(x).view(1)
    m = multiplier(amax, format) if m is None else m
    q = encode(x.float() * m, format)
    return q, 1 / m, _transposed(q, transpose), amax


def quantize_blocks(
    x: Tensor, format: str, layout: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a multiplier for each block: data [m, n] and its scales, transposed data [n, m] and
    its scales, or empty.

    Scales are [ceil(m / rows), ceil(n / columns)] in fp32, or in e8m0: the least power of two that
    keeps the amax in range (Mishra et al. 2025, arXiv:2506.08027). Blocks at the edge may be
    partial.
    """
    chosen = LAYOUTS[layout]
    q, scale = _blocks(x.float(), format, chosen)
    if chosen.rows == 1 and transpose:
        return q, scale, *_blocks(x.float().T.contiguous(), format, chosen)
    return q, scale, _transposed(q, transpose), _transposed(scale, transpose)


def _blocks(x: Tensor, format: str, layout: Layout) -> tuple[Tensor, Tensor]:
    rows, columns = layout[:2]
    m, n = x.shape
    padded = F.pad(x, (0, -n % columns, 0, -m % rows))
    # [m / rows, rows, n / columns, columns]
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = finite_amax(blocks, (1, 3))
    if layout.scale == "e8m0":
        exponent = e8m0(amax, format)
        scale = exponent.view(torch.float8_e8m0fnu)
        # The reciprocal of 2^(e - 127) has the biased exponent 254 - e.
        factor = ((254 - exponent.int()) << 23).view(torch.float32)
    else:
        factor = multiplier(amax, format, layout.scale)
        scale = 1 / factor
    q = encode((blocks * factor[:, None, :, None]).flatten(2).flatten(0, 1), format)
    return q[:m, :n].contiguous(), scale


def e8m0(amax: Tensor, format: str) -> Tensor:
    """Return the biased exponent, in uint8, of the least power of two s with `amax / s` in the
    range of `format`.
    """
    bits = amax.view(torch.int32)
    emax = {"e4m3": 8, "e5m2": 15}[format]  # both formats end at 1.75 * 2^emax
    # Where the mantissa exceeds 1.75, only the next power of two brings amax in range.
    return ((bits >> 23) - emax + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=0).to(torch.uint8)


def dequantize_blocks(q: Tensor, scale: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """Return `scale q` in `dtype` [m, n], worked out in fp32; `q` [m, n] and `scale` as
    `quantize_blocks` gives them.
    """
    rows, columns, _ = LAYOUTS[layout]
    spread = (
        scale.float()
        .repeat_interleave(rows, 0)[: q.shape[0]]
        .repeat_interleave(columns, 1)[:, : q.shape[1]]
    )
    return (q.float() * spread).to(dtype)


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to NVFP4: codes [m, n / 2] in uint8, block scales [m, ceil(n / 16)] in e4m3, scale
    [1]; even columns go low.

    A number is `code * block scale * scale`. A block that holds a NaN has a NaN for its scale, as
    e2m1 has none. `x` [m, n] with even n. Source: NVIDIA 2025, arXiv:2509.25149, appendix C.
    """
    amax = finite_amax(x).view(1)
    top = span(amax, NVFP4_SPAN)
    blocks = F.pad(x.float(), (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    # The kernels multiply by the fp32 reciprocal of 6; a division would round differently.
    scale = encode(finite_amax(blocks, 2) * torch.full((), 1 / 6, device=x.device) * top, "e4m3")
    decoded = scale.float()
    factor = (top / decoded).where(decoded > 0, 0.0)
    code = encode_e2m1(blocks * factor[:, :, None]).flatten(1)[:, : x.shape[1]]
    marked = (
        scale.view(torch.uint8).masked_fill(blocks.isnan().any(2), 0x7F).view(torch.float8_e4m3fn)
    )
    return code[:, ::2] | (code[:, 1::2] << 4), marked, 1 / top


def dequantize_nvfp4(
    packed: Tensor, block_scale: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the numbers [m, n] in `dtype` that `quantize_nvfp4` gave, worked out in fp32."""
    code = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    spread = (block_scale.float() * scale).repeat_interleave(16, 1)[:, : code.shape[1]]
    return (decode_e2m1(code) * spread).to(dtype)


def delayed_multiplier(history: Tensor, format: str, margin: int = 0) -> Tensor:
    """Return the multiplier [1] of delayed scaling: that of the greatest amax in `history`
    [window], over 2^margin.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    return multiplier(history.amax(0, keepdim=True), format) * 2.0**-margin


def push_amax_(history: Tensor, amax: Tensor) -> Tensor:
    """Put `amax` [1] at the front of `history` [window], in place, and drop the oldest."""
    history.copy_(torch.cat([amax, history[:-1]]))
    return history


def _transposed(x: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return x.new_empty((0, 0))
    bytes_or_x = x.view(torch.uint8) if x.element_size() == 1 else x
    return bytes_or_x.T.clone(memory_format=torch.contiguous_format).view(x.dtype)
