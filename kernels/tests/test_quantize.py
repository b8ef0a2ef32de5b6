"""Quantised formats: every bit of the kernels against the definition, and the definition against
first principles.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mtrain_kernels.parity import caught, layouts, poisoned
from mtrain_kernels.quantize import op, reference
from mtrain_kernels.quantize.formats import FORMATS, LAYOUTS
from mtrain_kernels.registry import Unavailable
from torch import Tensor
from torch.nn import functional as F

MODULE = "mtrain_kernels.quantize.triton"
SHAPES = [(3, 40), (130, 140), (0, 16), (5, 0)]


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normal numbers over many magnitudes, with zeros, infinities and not-a-numbers
    interspersed.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(
        -12, 6, (rows, columns), generator=generator
    )
    strewn = torch.rand(rows, columns, generator=generator)
    x[strewn < 0.02] = 0
    x[strewn > 0.998] = torch.inf
    x[strewn > 0.999] = -torch.inf
    x[strewn > 0.9995] = torch.nan
    if x.numel():
        x[0, 1] = torch.nan
    if rows > 2:
        x[2, : columns // 2] = 0  # blocks of nothing
    return x.to(dtype)


def assert_same_bits(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype, f"{i}: {a.dtype} instead of {b.dtype}"
        assert a.shape == b.shape, f"{i}: {tuple(a.shape)} instead of {tuple(b.shape)}"
        a, b = (
            t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int32)
            for t in (a, b)
        )
        assert torch.equal(a, b), f"{i}: {int((a != b).sum())} of {a.numel()} differ"


def both(function: Any, *args: Any, **options: Any) -> None:
    with poisoned():
        found = function(*args, impl="triton", **options)
    assert_same_bits(found, function(*args, impl="reference", **options))


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, "e4m3"), (torch.float16, "e5m2"), (torch.bfloat16, "e4m3")],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_tensorwise_is_bitwise(shape, format, dtype):
    x = numbers(*shape, dtype)
    if x.numel() < 1000 or dtype == torch.float32:  # the interpreter is slow
        both(op.quantize_tensorwise, x, format=format, transpose=True)
    both(op.quantize_tensorwise, x, format=format, multiplier=torch.tensor([3.7]))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layout", "format"), zip(LAYOUTS, itertools.cycle(["e4m3", "e5m2"]), strict=False)
)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_blocks_are_bitwise(shape, layout, format):
    x = numbers(*shape, torch.bfloat16)
    both(op.quantize_blocks, x, format=format, layout=layout, transpose=True)
    found = op.quantize_blocks(x, format=format, layout=layout, impl="reference")
    dtype = torch.float32 if format == "e4m3" else torch.bfloat16
    back = [
        op.dequantize_blocks(*found[:2], layout=layout, dtype=dtype, impl=c)
        for c in ("triton", "reference")
    ]
    torch.testing.assert_close(*back, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [*SHAPES, (4, 18)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantize_nvfp4_is_bitwise(shape, dtype):
    x = numbers(*shape, dtype)
    both(op.quantize_nvfp4, x)
    found = op.quantize_nvfp4(x, impl="reference")
    back = [op.dequantize_nvfp4(*found, dtype=dtype, impl=impl) for impl in ("triton", "reference")]
    torch.testing.assert_close(*back, rtol=0, atol=0, equal_nan=True)


def test_quantize_nvfp4_ties_go_to_even():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat(
        [ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(9.0)), -ties]
    )
    x = torch.zeros(1, 80)
    x[0, :64].view(4, 16)[:, :7] = near.view(4, 7)
    x[0, :64].view(4, 16)[:, 8] = 6.0  # multiplied by one,
    x[0, 79] = 6.0 * 448.0  # as the tensor is
    both(op.quantize_nvfp4, x)
    codes = op.quantize_nvfp4(x, impl="triton")[0].view(5, 8)[:, :4]
    found = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:4, :7]
    assert found.tolist() == [
        [0, 2, 2, 4, 4, 6, 6],
        [0, 1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7],
        [8, 10, 10, 12, 12, 14, 14],
    ]


@pytest.mark.parametrize(
    "options", [{"layout": "1x128"}, {"layout": "mx"}, {"layout": "128x128"}, {}], ids=str
)
def test_quantize_swiglu_epilogue_is_bitwise(options):
    x = torch.randn(37, 2 * 136, generator=torch.Generator().manual_seed(3)).bfloat16()
    gate, up = x.float().chunk(2, 1)
    y = (F.silu(gate) * up).bfloat16()
    plain = op.quantize_blocks if options else op.quantize_tensorwise
    wanted = plain(y, transpose=True, impl="reference", **options)
    assert_same_bits(op.swiglu_quantize(x, transpose=True, impl="reference", **options), wanted)
    found = op.swiglu_quantize(x, transpose=True, impl="triton", **options)
    assert_nearly_same(found, wanted)


def assert_nearly_same(found: Any, wanted: Any) -> None:
    """Assert equality, except for a few elements that another order of summation rounds to a
    neighbour.
    """
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.element_size() == 1:
            distance = (
                a.contiguous().view(torch.uint8).int() - b.contiguous().view(torch.uint8).int()
            ).abs()
            assert distance.max() <= 1
            assert (distance > 0).float().mean() < 0.03
        else:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=0)


def test_quantize_strides_do_not_matter():
    x = numbers(9, 130, torch.float32)
    wanted = op.quantize_blocks(x, impl="reference")
    for _, other in layouts(x):
        assert_same_bits(op.quantize_blocks(other, impl="triton"), wanted)
    assert_same_bits(op.quantize_blocks(x.view(3, 3, 130), impl="triton"), wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_rounds_to_nearest_of_all_numbers(format):
    _, _, greatest, dtype = FORMATS[format]
    if dtype is None:
        table = reference.decode_e2m1(torch.arange(8, dtype=torch.uint8))
    else:
        table = torch.arange(128, dtype=torch.uint8).view(dtype).float()
        table = table[table <= greatest]
    table = table.double()
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat(
        [table, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), torch.tensor([1e-40, 1e9])]
    )
    x = torch.cat([x, -x]).float()
    distance = (x.double().abs()[:, None] - table).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(len(table)) % 2 == 0
    code = torch.where(nearest.sum(1, keepdim=True) > 1, nearest & even, nearest).int().argmax(1)
    sign = 8 if dtype is None else 128
    code = (code + sign * torch.signbit(x)).to(torch.uint8)
    if dtype is None:
        encoded = reference.encode_e2m1(x)
    else:
        encoded = reference.encode(x, format).view(torch.uint8)
    assert torch.equal(encoded, code)
    if dtype is not None:
        one = torch.ones(1)
        found = op.quantize_tensorwise(x, format=format, multiplier=one, impl="triton").data
        assert torch.equal(found.view(torch.uint8)[0], code)


def test_quantize_power_of_two_scale_keeps_amax():
    amax = torch.tensor([448.0, 448.1, 224.0, 1.75, 1.7500001, 1e-38, 0.0, 3e38])
    exponent = reference.e8m0(amax, "e4m3").int() - 127
    scaled = amax.double() / 2.0 ** exponent.double()
    assert bool((scaled <= 448).all())
    assert bool((scaled[:5] > 224).all())
    assert exponent.tolist() == [0, 1, -1, -8, -7, -127, -127, 120]


def test_quantize_delayed_scaling_takes_window_maximum():
    history = torch.tensor([1.0, 4.0, 2.0])
    assert reference.delayed_multiplier(history, "e4m3").item() == 112
    assert reference.delayed_multiplier(history, "e4m3", margin=1).item() == 56
    found = op.quantize_tensorwise(
        torch.tensor([[8.0, -3.0]]), multiplier=torch.tensor([112.0]), impl="triton"
    )
    assert found.data.float().tolist() == [[448.0, -320.0]]  # 336 is a tie
    assert reference.push_amax_(history, found.amax).tolist() == [8.0, 1.0, 4.0]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_quantize_round_trip_is_near(scale):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)) * scale
    for layout in LAYOUTS:
        q = op.quantize_blocks(x, layout=layout, impl="reference")
        back = op.dequantize_blocks(
            q.data, q.scale, layout=layout, dtype=torch.float32, impl="reference"
        )
        assert (back - x).double().norm() / x.double().norm() < 0.03
    back = op.dequantize_nvfp4(
        *op.quantize_nvfp4(x, impl="reference"), dtype=torch.float32, impl="reference"
    )
    assert (back - x).double().norm() / x.double().norm() < 0.11


@pytest.mark.sampled(9)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_quantize_passes_opcheck(backend):
    x = numbers(4, 32, torch.bfloat16).nan_to_num(0, 1, 1)
    run = torch.library.opcheck
    run(op._tensorwise.op, (x, None, "e4m3", True, False, backend))
    run(op._blocks.op, (x, "e4m3", "mx", True, True, backend))
    q, scale, *_ = op._blocks(x, "e4m3", "1x128", False, False, "reference")
    run(op._dequantize.op, (q, scale, "e4m3", "1x128", torch.bfloat16, backend))
    run(op._nvfp4.op, (x, backend))
    run(op._nvfp4_dequantize.op, (*op._nvfp4(x, "reference"), torch.bfloat16, backend))
    run(op._amax.op, (x, True, backend))


def square(layout: str, format: str = "e4m3", shape: tuple[int, int] = (130, 140)) -> Any:
    return lambda: test_quantize_blocks_are_bitwise(shape, layout, format)


def tensorwise(shape: tuple[int, int] = (3, 40)) -> None:
    test_quantize_tensorwise_is_bitwise(shape, "e4m3", torch.float32)


def nvfp4() -> None:
    test_quantize_nvfp4_is_bitwise((3, 40), torch.float32)


def ties_of_four_bits() -> None:
    test_quantize_nvfp4_ties_go_to_even()


def ties() -> None:
    test_quantize_rounds_to_nearest_of_all_numbers("e4m3")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "old", "new", "noticed_by"),
    [
        ("triton", "((big >> DROPPED) & 1)", "1", ties),
        ("triton", "tl.minimum(tl.abs(x), GREATEST)", "tl.abs(x)", ties),
        ("triton", "tl.where(nan, 0x7F, code)", "code", tensorwise),
        ("triton", "2.0 ** (1 - BIAS)", "2.0 ** (-4 - BIAS)", ties),
        ("triton", "> 0x600000", ">= 0x600000", lambda: powers_of_two()),
        ("triton", 'tl.where(magnitude < float("inf"), magnitude, 0.0)', "magnitude", tensorwise),
        (
            "triton",
            "mask=inside, other=0.0",
            "mask=inside, other=9.0",
            lambda: test_quantize_strides_do_not_matter(),
        ),
        ("triton", "transposed_at, tl.trans(q), mask", "transposed_at, q, mask", square("128x128")),
        (
            "triton",
            "tl.trans(in_order(q, SIDE, RUN)), mask",
            "in_order(q, SIDE, RUN), mask",
            tensorwise,
        ),
        (
            "triton",
            "254 + EMAX - (bits >> 23) - above",
            "254 + EMAX - (bits >> 23)",
            square("1x128_power_of_two"),
        ),
        (
            "triton",
            "tl.reshape(cut * m[:, :, None]",
            "tl.reshape(cut",
            square("1x128", shape=(3, 40)),
        ),
        (
            "triton",
            "tl.where(exponent == 0, 0x00400000, exponent << 23)",
            "(exponent << 23)",
            lambda: powers_of_two(),
        ),
        ("triton", "row[:, None] // BLOCK_ROWS", "row[:, None]", square("128x128", shape=(3, 40))),
        ("triton", "cut * m[:, None, :]", "cut", square("mx", shape=(3, 40))),
        ("triton", "* tl.load(multiplier_ptr)", "* 1.0", tensorwise),
        ("nvfp4_triton", "_signed(low, first) |", "_signed(low, second) |", nvfp4),
        (
            "nvfp4_triton",
            "near * 0.5 + (ROUND + 4.0)",
            "near * 0.5 + (ROUND + 5.0)",
            ties_of_four_bits,
        ),
        ("nvfp4_triton", "pairs(right *", "pairs(left *", nvfp4),
        ("nvfp4_triton", "(1.0 / 6.0)", "(1.0 / 4.0)", nvfp4),
        ("nvfp4_triton", "both >> 4", "both & 15", nvfp4),
        (
            "nvfp4_triton",
            "scale_ptr + row.to(tl.int64) * width",
            "scale_ptr + row.to(tl.int64) * 2",
            nvfp4,
        ),
    ],
)
def test_quantize_seeded_bug_is_found(module, old, new, noticed_by):
    with caught(f"mtrain_kernels.quantize.{module}", old, new):
        noticed_by()


@pytest.mark.parametrize("value", [448.0, 1e-38, 3e38])
def test_quantize_powers_of_two_turn_bitwise(value):
    x = torch.full((2, 32), value)
    both(op.quantize_blocks, x, layout="mx")
    found = op.quantize_blocks(x, layout="mx", impl="reference")
    back = [
        op.dequantize_blocks(*found[:2], layout="mx", dtype=x.dtype, impl=c)
        for c in ("triton", "reference")
    ]
    torch.testing.assert_close(*back, rtol=0, atol=0)


def powers_of_two() -> None:
    for value in (448.0, 1e-38):
        test_quantize_powers_of_two_turn_bitwise(value)


def test_quantize_unfit_is_refused():
    x = torch.zeros(4, 33)
    with pytest.raises(ValueError, match="e4m3 or e5m2"):
        op.quantize_tensorwise(x, format="e2m1")
    with pytest.raises(ValueError, match="fp32, fp16 or bf16"):
        op.quantize_blocks(x.double())
    with pytest.raises(ValueError, match="no layout"):
        op.quantize_blocks(x, layout="1x64")
    with pytest.raises(ValueError, match="odd"):
        op.quantize_nvfp4(x)
    with pytest.raises(ValueError, match="halves"):
        op.swiglu_quantize(x)
    with pytest.raises(ValueError, match=r"\[1\] in fp32"):
        op.quantize_tensorwise(x, multiplier=torch.ones(2))
    with pytest.raises(ValueError, match="scale"):
        op.dequantize_blocks(op.quantize_blocks(x).data, torch.ones(1), layout="1x128")
    codes, of_blocks, scale = op.quantize_nvfp4(x[:, :32])
    for wrong in (
        (codes.int(), of_blocks, scale),
        (codes, of_blocks.float(), scale),
        (codes, of_blocks, scale.half()),
    ):
        with pytest.raises(ValueError, match="uint8, e4m3 and fp32"):
            op.dequantize_nvfp4(*wrong)
    long = torch.empty(1, 128 << 16, device="meta")
    with pytest.raises(Unavailable, match="longer than 8388480"):
        op.quantize_blocks(long, impl="triton")
    assert op.quantize_blocks(long[:, :-128], impl="triton").scale.shape == (1, 65535)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_quantize_empty_keeps_rows_and_columns(impl):
    for shape, rows in (((3, 0), 3), ((2, 3, 0), 6), ((0, 8), 0)):
        x = torch.zeros(shape)
        whole, blocks = (
            f(x, transpose=True, impl=impl) for f in (op.quantize_tensorwise, op.quantize_blocks)
        )
        for found in (whole, blocks):
            assert (found.data.shape, found.transposed.shape) == (
                (rows, shape[-1]),
                (shape[-1], rows),
            )
        assert op.dequantize_blocks(blocks.data, blocks.scale, layout="1x128", impl=impl).shape == (
            rows,
            shape[-1],
        )
        assert op.quantize_nvfp4(x, impl=impl)[0].shape == (rows, shape[-1] // 2)
