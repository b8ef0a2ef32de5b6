"""Eight- and four-bit floating-point formats, and how a tensor is divided into parts with a scale
each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """`mantissa` bits, exponent `bias` and greatest number of a format; without a `dtype` for four
    bits.
    """

    mantissa: int
    bias: int
    greatest: float
    dtype: torch.dtype | None


# OCP 8-bit floating point specification 1.0; OCP microscaling formats specification 1.0 for e2m1
FORMATS = {
    "e4m3": Format(3, 7, 448.0, torch.float8_e4m3fn),
    "e5m2": Format(2, 15, 57344.0, torch.float8_e5m2),
    "e2m1": Format(1, 1, 6.0, None),
}


class Layout(NamedTuple):
    """Blocks of `rows` x `columns` share a scale: fp32, fp32 that is a `power_of_two`, or the 8-bit
    exponent `e8m0`.

    With `rows` 1 the blocks of a transposed result run along its own rows, so that each of the two
    is quantised along the axis over which a matrix product sums.
    """

    rows: int
    columns: int
    scale: str = "fp32"


LAYOUTS = {
    "1x128": Layout(1, 128),
    "128x128": Layout(128, 128),
    "1x128_power_of_two": Layout(1, 128, "power_of_two"),
    "128x128_power_of_two": Layout(128, 128, "power_of_two"),
    "mx": Layout(1, 32, "e8m0"),
}

PTX_ENCODE = (  # four numbers to e4m3, in two conversions of two
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32"
    " high, $4, $3; mov.b32 $0, {low, high}; }"
)
PTX_DECODE = (  # and back
    "{ .reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high; mov.b32 {a, b}, ab; mov.b32 {c,"
    " d}, cd; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)
PTX_ENCODE_E2M1 = (  # four pairs, of which $1 to $4 go low, to e2m1
    "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, $5, $1; cvt.rn.satfinite.e2m1x2.f32 b,"
    " $6, $2; cvt.rn.satfinite.e2m1x2.f32 c, $7, $3; cvt.rn.satfinite.e2m1x2.f32 d, $8, $4; mov.b32"
    " $0, {a, b, c, d}; }"
)
# the last bits of $1 to $8, which are 1.5 * 2^23 and a code, and the signs of $9 to $16, in such
# pairs
PTX_PACK = (
    "{ .reg .b32 code, sign; mad.lo.u32 code, $8, 16, $4; shf.l.wrap.b32 sign, $16, $16, 4;"
    " shf.l.wrap.b32 sign, $12, sign, 4;"
    + "".join(
        f" mad.lo.u32 code, code, 16, ${at}; shf.l.wrap.b32 sign, ${at + 8}, sign, 4;"
        for at in (7, 3, 6, 2, 5, 1)
    )
    # (sign & mask) | code
    + " sub.u32 code, code, 0x3F400000; lop3.b32 $0, sign, 0x88888888, code, 0xEA; }"
)
