"""Formats of fewer bits for the optimizer's state: split masters, stochastic rounding, eight-bit
moments.

All of it in plain torch, as the definition that the kernels are held against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_kernels.quantize.reference import encode, finite_amax, multiplier
from mtrain_kernels.runtime import ceil_div

MOMENT_BLOCK = 128  # elements of an eight-bit moment that share a scale
_LOW = 0xFFFFFFFF


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 -> the nearest bf16 weight and a signed 16-bit remainder: master bits = weight
    bits << 16 + remainder.

    A tie goes away from zero and not to the even weight: 2^32 masters share 2^16 weights with 2^16
    remainders each, and rounding to even would give an even weight one master too many. NaN loses
    its payload.
    """
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32).long() & _LOW)
    upper = (bits + 0x8000) >> 16
    remainder = bits - (upper << 16)
    return _narrow(upper).view(torch.bfloat16), remainder.to(torch.int16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master from the bf16 weight and the 16-bit remainder of `split_master`,
    exactly.
    """
    bits = ((weight.view(torch.int16).long() & 0xFFFF) << 16) + remainder.long()
    return _as_int32(bits & _LOW).view(torch.float32)


def philox(
    seed: int, index: Tensor, stream: int, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit random words, in int64, for each `index` (int64) of the tensor `stream` at
    a `step`.

    Philox4x32 with 10 rounds, the counter being (index low, index high, stream, step) and the key
    the 64-bit seed, so that a number depends on its place and on nothing else. Source: Salmon et
    al. 2011, doi:10.1145/2063384.2063405.
    """
    c0 = index & _LOW
    c1 = (index >> 32) & _LOW
    c2 = torch.full_like(c0, stream & _LOW)
    c3 = torch.full_like(c0, step & _LOW)
    k0 = seed & _LOW
    k1 = (seed >> 32) & _LOW
    for _ in range(10):
        # wraps as it should: the 64 bits are all there
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0 = ((b >> 32) & _LOW) ^ c1 ^ k0
        c2 = ((a >> 32) & _LOW) ^ c3 ^ k1
        c1 = b & _LOW
        c3 = a & _LOW
        k0 = (k0 + 0x9E3779B9) & _LOW
        k1 = (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def words(
    seed: int, size: int, stream: int, step: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three times 16 random bits, in int64, for each of `size` elements of a tensor.

    Elements 2 i and 2 i + 1 share the words of `philox` for i: the even one has their low halves.
    """
    found = philox(seed, torch.arange((size + 1) // 2, device=device), stream, step)[:3]
    first, second, third = (
        torch.stack((word & 0xFFFF, word >> 16), 1).flatten()[:size] for word in found
    )
    return first, second, third


def stochastic_bf16(x: Tensor, words: Tensor) -> Tensor:
    """Return fp32 -> one of the two neighbours in bf16, by chance, right on average: 16 random bits
    are added.
    """
    bits = (x.view(torch.int32).long() & _LOW) + words
    return _narrow(torch.where(x.isnan(), 0x7FC0, bits >> 16)).view(torch.bfloat16)


def store_moment(
    x: Tensor, dtype: torch.dtype, second: bool, words: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return a moment [n] in fp32 as it is kept, with its scales: fp32, bf16 (stochastic with
    `words`), or 8 bits for uint8.

    Eight bits are e4m3 with a power of two as the scale of 128 elements: storing again what was
    loaded changes nothing. Of the second moment it is the square root, whose exponents spread half
    as wide, and what is above zero stays above zero, so that no step is divided by nothing.
    """
    if dtype == torch.uint8:
        x = x.sqrt() if second else x
        blocks = torch.nn.functional.pad(x, (0, -len(x) % MOMENT_BLOCK)).unflatten(
            0, (-1, MOMENT_BLOCK)
        )
        factor = multiplier(finite_amax(blocks, 1), "e4m3", "power_of_two")
        code = encode(blocks * factor[:, None], "e4m3").view(torch.uint8)
        if second:
            # Code 1 is the smallest number above zero.
            code = code.clamp(min=1).where(blocks > 0, code)
        return code.flatten()[: len(x)], 1 / factor
    return (
        stochastic_bf16(x, words) if words is not None and dtype == torch.bfloat16 else x.to(dtype)
    ), None


def load_moment(kept: Tensor, scale: Tensor | None, second: bool) -> Tensor:
    """Return the moment [n] in fp32 from what `store_moment` gave; fp32 is returned as it is."""
    if kept.dtype != torch.uint8:
        return kept.float()
    assert scale is not None
    x = kept.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(MOMENT_BLOCK)[: len(kept)]
    return x.square() if second else x


def scales_of(size: int) -> int:
    """Return how many scales an eight-bit moment of `size` elements has."""
    return ceil_div(size, MOMENT_BLOCK)


def _as_int32(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


def _narrow(upper: Tensor) -> Tensor:
    upper = upper & 0xFFFF
    return torch.where(upper >= 1 << 15, upper - (1 << 16), upper).to(torch.int16)
