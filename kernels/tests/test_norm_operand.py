"""Norms and SwiGLU that quantise for the linear layer behind: to the bit as if it were done behind
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mtrain_kernels import parity
from mtrain_kernels.activation.op import activation
from mtrain_kernels.fp8_linear.op import Recipe, Shares, fp8_linear
from mtrain_kernels.norm import op, operand
from mtrain_kernels.norm.operand import norm_quantized
from mtrain_kernels.quantize.op import Operand, quantize_blocks, quantize_tensorwise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = Recipe("blockwise")
TENSOR = Recipe("tensorwise", backward="e5m2")
SHAPES = [(1, 40), (3, 2, 136), (131, 300), (0, 16)]


def inputs(
    shape: tuple[int, ...], full: bool, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return inputs of a norm: `full` is LayerNorm of a sum, with a bias and a weight around zero,
    otherwise RMSNorm.
    """
    torch.manual_seed(0)

    def leaf(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE).to(dtype).requires_grad_()

    width = shape[-1]
    if full:
        more = {"residual": leaf(*shape), "bias": leaf(width)}
    else:
        more = {"residual": None, "bias": None}
    options = {"subtract_mean": full, "zero_centered": full, "eps": 1e-5}
    return {"x": leaf(*shape), "weight": leaf(width), **more, **options}


def plain(given: dict[str, Any], impl: str = "triton") -> tuple[Tensor, Tensor | None]:
    """Return the result of the norm by itself, and its sum."""
    options = {"zero_centered": given["zero_centered"], "impl": impl}
    if not given["subtract_mean"]:
        return op.rms_norm(given["x"], given["weight"], given["eps"], **options), None
    both = given["x"], given["residual"]
    return op.layer_norm_residual(*both, given["weight"], given["bias"], given["eps"], **options)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def assert_same(
    found: Operand, y: Tensor, layout: str | None, format: str, multiplier: Tensor | None = None
) -> None:
    options: dict[str, Any] = {"format": format, "transpose": True, "impl": "reference"}
    if layout is None:
        wanted = quantize_tensorwise(y, multiplier=multiplier, **options)
    else:
        wanted = quantize_blocks(y, layout=layout, **options)
    again = found.transposed(*found.kept)
    both = zip(
        (found.data, found.scale, *again),
        wanted[:4],
        ("data", "scale", "transposed", "its scale"),
        strict=True,
    )
    for a, b, name in both:
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(bits(a), bits(b)), f"{name}: {int((bits(a) != bits(b)).sum())} differ"


COMPILED = """
import re, torch
from mtrain_kernels import aot
from mtrain_kernels.norm import triton
compiled = {}
x = torch.empty((8, 4096), dtype=torch.bfloat16, device="meta")
with aot._compile_only(90, compiled, False):
    triton.forward(x, x, x[0], x[0], 1e-5, True, True, "blocks", "e4m3", "1x128_power_of_two")
((_, kernel),) = compiled.values()
for root in re.findall(r"= math.sqrt .* : ([^ ]*)", kernel.asm["ttgir"]):
    print(root)
"""


@pytest.mark.full
def test_norm_operand_written_and_quantised_share_divisor() -> None:
    """Compute the divisor once: a compiler may compute a tensor once for each layout, with another
    order of sums; on a card the bytes differed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["f32"]


@pytest.mark.sampled
@pytest.mark.covering(1)
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_operand_equals_quantised_norm_bitwise(
    shape: tuple[int, ...], full: bool, impl: str
) -> None:
    given = inputs(shape, full)
    alone, total = plain(given, impl)
    for layout, format in (("1x128_power_of_two", "e4m3"), (None, "e5m2"), ("mx", "e4m3")):
        with parity.poisoned():
            y, both, found = norm_quantized(**given, format=format, layout=layout, impl=impl)
            assert_same(found, y, layout, format)
        assert torch.equal(bits(y), bits(alone))
        assert total is None or torch.equal(bits(both), bits(total))


@pytest.mark.parametrize("full", [False, True])
def test_norm_operand_scale_is_whole_or_given(full: bool) -> None:
    given = inputs((9, 200), full)
    y, _, found = norm_quantized(**given, share=lambda amax: 2 * amax, impl="triton")
    whole = 448 / (2 * y.detach().float().abs().amax()).view(1)
    assert_same(found, y, None, "e4m3", whole)
    delayed = torch.tensor([3.7], device=DEVICE)
    y, _, found = norm_quantized(**given, multiplier=delayed, impl="triton")
    assert_same(found, y, None, "e4m3", delayed)


def through(given: dict[str, Any], recipe: Recipe, prepared: bool) -> list[Tensor]:
    """Return value and gradients of a norm and the linear layer after it, and of the sum."""
    leaves = [t for t in given.values() if isinstance(t, Tensor)]
    torch.manual_seed(1)
    weight = (
        torch.randn(48, given["x"].shape[-1], device=DEVICE).to(given["x"].dtype).requires_grad_()
    )
    if prepared:
        y, total, made = norm_quantized(**given, layout=recipe.layout, impl="triton")
        out = fp8_linear(
            torch.full_like(y, torch.nan).detach() * 0 + y,
            weight,
            recipe,
            operand=made,
            impl="triton",
        )
    else:
        y, total = plain(given)  # type: ignore[assignment]
        out = fp8_linear(y, weight, recipe, impl="triton")
    ends = [out] if given["residual"] is None else [out, total]
    steps = [torch.randn(end.shape, device=DEVICE).to(end.dtype) for end in ends]
    return [out.detach(), *torch.autograd.grad(ends, [*leaves, weight], steps)]


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", [BLOCKS, TENSOR], ids=["blocks", "tensor"])
@pytest.mark.parametrize("full", [False, True])
def test_norm_operand_consumer_gets_equal_values_and_gradients(recipe: Recipe, full: bool) -> None:
    given = inputs((131, 300), full)
    with parity.poisoned():
        found = through(given, recipe, True)
    wanted = through(given, recipe, False)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", [BLOCKS, TENSOR], ids=["blocks", "tensor"])
@pytest.mark.parametrize("shape", [(3, 80), (5, 27, 300)])
def test_norm_operand_swiglu_prologue_equals_swiglu(shape: tuple[int, ...], recipe: Recipe) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(48, shape[-1] // 2, device=DEVICE).bfloat16().requires_grad_()
    step = torch.randn(*shape[:-1], 48, device=DEVICE).bfloat16()
    shares = Shares(x=lambda amax: 1.5 * amax)
    options: dict[str, Any] = {"shares": shares, "impl": "triton"}
    for impl in ("triton", "reference") if len(shape) == 2 else ("triton",):
        with parity.poisoned():
            fused = fp8_linear(x, weight, recipe, swiglu=impl, **options)
            found = [fused, *torch.autograd.grad(fused, [x, weight], step)]
        apart = fp8_linear(activation(x, "swiglu", impl=impl), weight, recipe, **options)
        wanted = [apart, *torch.autograd.grad(apart, [x, weight], step)]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True))
        with torch.no_grad():
            assert torch.equal(
                bits(fp8_linear(x, weight, recipe, swiglu=impl, **options)), bits(apart)
            )


def blocks() -> None:
    test_norm_operand_equals_quantised_norm_bitwise((131, 300), True, "triton")


def tensor() -> None:
    test_norm_operand_scale_is_whole_or_given(True)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("module", "old", "new", "noticed_by"),
    [
        (
            "triton",
            "y = tl.where(inside, y.to(tl.float32), 0.0)",
            "y = y.to(tl.float32) + 1",
            blocks,
        ),
        ("triton", "cut * m[:, :, None]", "cut", blocks),
        (
            "triton",
            "row[:, None] * groups + group, scale",
            "row[:, None] * groups + group, scale * 2",
            blocks,
        ),
        ("triton", "y *= tl.load(multiplier_ptr)", "pass", tensor),
        ("triton", "tl.max(tl.max(finite(y), 1), 0)", "tl.min(tl.min(finite(y), 1), 0)", tensor),
        ("operand_triton", "at, tl.trans(q), mask", "at, q, mask", blocks),
        ("operand_triton", "[:, None] * weight[None, :]", "[:, None]", blocks),
        ("operand_triton", "weight += 1.0", "weight += 0.0", blocks),
        ("operand_triton", "cast(y, TYPE)", "cast(y, tl.float32)", blocks),
        ("operand_triton", "count = tl.cdiv(rows, GROUP)", "count = 1", blocks),
        ("operand_triton", "* tl.load(multiplier_ptr)", "* 1.0", tensor),
        ("operand_triton", "0.0)[:, None], 0.0)", "0.0)[:, None] * 0, 0.0)", blocks),
    ],
)
def test_norm_operand_seeded_bug_is_found(module: str, old: str, new: str, noticed_by: Any) -> None:
    with parity.caught(f"mtrain_kernels.norm.{module}", old, new):
        noticed_by()


@pytest.mark.full
def test_norm_operand_passes_torch_registration() -> None:
    given = inputs((5, 17), True)
    arguments = *(given[name] for name in ("x", "residual", "weight", "bias", "eps")), True, True
    one = torch.ones(1, device=DEVICE)
    made = operand._norm_operand.op
    torch.library.opcheck(made, (*arguments, "blocks", "e4m3", "1x128", None))
    quick: Any = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(
        operand._norm_operand.op, (*arguments, "tensor", "e5m2", "", one), **quick
    )
    x, weight, bias = (given[name].detach() for name in ("x", "weight", "bias"))
    rows = torch.ones(5, device=DEVICE)
    for multiplier in (one, None):
        kept = x, rows, rows, weight, bias, multiplier, True, torch.bfloat16, "e4m3", "1x128", True
        torch.library.opcheck(operand._codes.op, kept, **quick)


def test_norm_operand_unfit_is_refused() -> None:
    given = inputs((4, 16), False)
    with pytest.raises(ValueError, match="no scales of one row"):
        norm_quantized(**given, layout="128x128")
    for multiplier in (torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(())):
        with pytest.raises(ValueError, match=r"multiplier must be \[1\] in fp32"):
            norm_quantized(**given, multiplier=multiplier.to(DEVICE))
    with pytest.raises(ValueError, match="scales of its own"):
        norm_quantized(**given, layout="mx", multiplier=torch.ones(1, device=DEVICE))
    with pytest.raises(ValueError, match="no format"):
        norm_quantized(**given, format="e2m1")
    with pytest.raises(ValueError, match="last axis"):
        norm_quantized(**given | {"weight": given["weight"][:3]})
