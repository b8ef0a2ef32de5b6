"""Numbers that no random input has, for code that only a card runs: not a number, infinity,
subnormals, ties.

Conversions of the GPU's own, reciprocals without subnormal numbers and divisions without a slow way
round stand in branches that Triton's interpreter does not take. Each is compared with its
definition: all numbers of bf16, ties between them, and of each exponent of fp32 numbers at random.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from mtrain_kernels.cross_entropy.triton import bend
from mtrain_kernels.fp8_grouped import products
from mtrain_kernels.optimizer import rounding
from mtrain_kernels.optimizer.triton import stochastic
from mtrain_kernels.quantize import op, reference
from mtrain_kernels.quantize.triton import encode, greatest_finite
from mtrain_kernels.runtime import exp2, interpreted, reciprocal, rounded, sigmoid
from torch import Tensor

SIDE = 64
COLUMNS = 128
LEAST = 2.0**-126  # below it the GPU may give 0
HALF_WORD = 0x9CE5
LAYOUTS = ("tensorwise", "1x128", "128x128", "mx")
FORMATS = ("e4m3", "e5m2")


def every_bf16(device: Any) -> Tensor:
    """Return all numbers of bf16 [512, 128], a row of one sign and exponent; without subnormal ones
    in the interpreter.

    That gives 0 for them when it makes fp32 of bf16.
    """
    return _known(
        torch.arange(-(1 << 15), 1 << 15, device=device)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(512, -1)
    )


def _known(x: Tensor) -> Tensor:
    if interpreted():
        return torch.where(x.abs() < LEAST, torch.copysign(torch.zeros_like(x), x), x)
    return x


def every_exponent(device: Any) -> Tensor:
    """Return fp32 [512, 128] of random mantissas, a row for each exponent twice.

    The second time the greatest is a little above 7/4 of a power of two: its scale has a mantissa
    of ones only, which a division gets right last.
    """
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (512, COLUMNS), device=device, dtype=torch.int64)
    exponent = (torch.arange(512, device=device) % 256)[:, None] << 23
    bits = (bits & ~(255 << 23)) | exponent
    bits[256:511] &= ~(1 << 21)
    bits[256:511, :1] = exponent[256:511] | 0x600001
    return bits.to(torch.int32).view(torch.float32)


def numbers(device: Any) -> Tensor:
    """Return fp32 [1536, 128]: both of the above, and of each number of bf16 the tie above it."""
    all_of_bf16 = every_bf16(device)
    ties = (all_of_bf16.view(torch.int16).int() << 16) | 0x8000
    return _known(
        torch.cat([all_of_bf16.float(), ties.view(torch.float32), every_exponent(device)])
    )


@triton.jit
def functions_kernel(
    x_ptr, y_ptr, size, slope, WHAT: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr,
    HALF_WORD: tl.constexpr
):  # fmt: skip
    """Apply one function to a tile of numbers, in fp32."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    at = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    if WHAT == "rounded":
        y = rounded(x, tl.bfloat16)
    elif WHAT == "exp2":
        y = exp2(x)
    elif WHAT == "reciprocal":
        y = reciprocal(x)
    elif WHAT == "sigmoid":
        y = sigmoid(x)
    elif WHAT == "bend":
        y = bend(x, slope, True)
    elif WHAT == "stochastic":
        y = stochastic(x * slope, tl.zeros_like(x).to(tl.uint32) + HALF_WORD).to(tl.float32)
    elif WHAT == "e4m3":
        y = encode(x, 3, 7, 448.0).to(tl.float32)
    elif WHAT == "e5m2":
        y = encode(x, 2, 15, 57344.0).to(tl.float32)
    else:
        y = tl.zeros_like(x) + greatest_finite(x, 1)[:, None]
    tl.store(y_ptr + at, y, mask=at < size)


def applied(what: str, x: Tensor, slope: float = 1.0) -> Tensor:
    """Return a function of the kernels of each number of `x` [r, 128]; of all of a row for
    "greatest_finite".
    """
    y = torch.empty_like(x)
    functions_kernel[(-(-len(x) // SIDE),)](
        x, y, x.numel(), slope, WHAT=what, SIDE=SIDE, COLUMNS=COLUMNS, HALF_WORD=HALF_WORD
    )
    return y


def functions(device: Any) -> dict[str, str]:
    """Return where each function differs from its definition: empty if nowhere."""
    x = numbers(device)
    words = torch.full((x.numel(),), HALF_WORD, device=device)
    exact = {
        "rounded": x.bfloat16().float(),
        "stochastic": rounding.stochastic_bf16(x.flatten(), words).float().view_as(x),
        "e4m3": reference.encode(x, "e4m3").view(torch.uint8).float(),
        "e5m2": reference.encode(x, "e5m2").view(torch.uint8).float(),
        "greatest_finite": reference.finite_amax(x, 1)[:, None].expand_as(x),
    }
    wide = x.double()
    normal = torch.where(x.abs() < LEAST, torch.copysign(torch.zeros_like(x), x), x).double()
    near = {
        "exp2": wide.clamp(-200, 200).exp2(),  # of those above it is infinite in either
        "reciprocal": 1 / normal,  # of which it is defined: subnormal numbers count as 0
        "sigmoid": 1 / (1 + (-wide).exp()),
    }
    found = {name: _other(applied(name, x), wanted, 0.0) for name, wanted in exact.items()}
    found |= {name: _other(applied(name, x), wanted, 1e-5) for name, wanted in near.items()}
    numbers_alone = torch.where(x.isnan(), 0.0, x)  # four neighbours become not a number together
    for cap in (1.0, 30.0):
        wanted = 1 / (1 + (2 * numbers_alone.double() / cap).exp())
        found[f"bend {cap:g}"] = _other(
            applied("bend", numbers_alone, 2.885390081777927 / cap), wanted, 1e-6, 1e-6
        )
    return {name: said for name, said in found.items() if said}


def operands(device: Any) -> dict[str, str]:
    """Return the same of quantised tensors, and of experts' rows, every byte."""
    found = {}
    counts = torch.tensor([130, 0, 1, 381], device=device)
    for kind, x in (("bf16", every_bf16(device)), ("fp32", every_exponent(device))):
        calls = {
            f"{layout} {format}": _blocks(x, layout, format)
            for layout in LAYOUTS
            for format in FORMATS
        }
        calls["nvfp4"] = lambda impl, x=x: op.quantize_nvfp4(x, impl=impl)
        for one in (True, False):
            calls[f"experts {one}"] = lambda impl, x=x, one=one: products.quantize_rows(
                x, counts.cumsum(0).int(), "e4m3", one, impl
            )
        for name, call in calls.items():
            for part, (ours, right) in enumerate(
                zip(call("triton"), call("reference"), strict=True)
            ):
                if part == 2 and name.startswith("experts"):  # behind the last block is anything
                    ours, right = (t[:, : 128 * 6] for t in (ours, right))
                if part == 3 and name == "experts False":
                    ours = ours[:, :6]
                    right = right[:, :6]
                found[f"{name} {kind} {part}"] = _other(_bytes(ours), _bytes(right), 0.0)
    return {name: said for name, said in found.items() if said}


def _blocks(x: Tensor, layout: str, format: str) -> Any:
    if layout == "tensorwise":
        return lambda impl: op.quantize_tensorwise(x, format=format, transpose=True, impl=impl)
    return lambda impl: op.quantize_blocks(
        x, format=format, layout=layout, transpose=True, impl=impl
    )


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.element_size() == 1 else x


def _other(found: Tensor, wanted: Tensor, tolerance: float, absolute: float = 0.0) -> str:
    """Return the first number that is not what was wanted, and how many are not; to the bit for a
    tolerance of 0.
    """
    a = found.double()
    b = wanted.double()
    near = (a - b).abs() <= tolerance * b.abs() + max(absolute, LEAST if tolerance else 0.0)
    over = (a == b) | (tolerance > 0) & a.isinf() & (b.abs() >= 2.0**127) & (a.sign() == b.sign())
    right = near | over | (a.isnan() & b.isnan())
    if not tolerance:
        right &= (a.signbit() == b.signbit()) | a.isnan()
    if right.all():
        return ""
    at = int((~right).flatten().nonzero()[0])
    return (
        f"{int((~right).sum())} differ, the first at {at}: {a.flatten()[at]:.9g} instead of"
        f" {b.flatten()[at]:.9g}"
    )
