"""Newton-Schulz against singular vectors, and its symmetric products against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mtrain_kernels import parity
from mtrain_kernels.newton_schulz import op, reference
from mtrain_kernels.newton_schulz.triton import _lower
from mtrain_kernels.registry import Unavailable
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.newton_schulz.triton"
SMALL_TILES = ("TILE = 128", "TILE = 32")
SMALL_GRID = ("STEP = 64\n", "STEP = 64\nGRID = 2\n")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@triton.jit
def place_kernel(out_ptr, first, SIZE: tl.constexpr):
    """Write the rows and columns of SIZE tiles."""
    at = tl.arange(0, SIZE)
    row, column = _lower(first + at)
    tl.store(out_ptr + at, row)
    tl.store(out_ptr + SIZE + at, column)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def inputs(b: int, m: int, k: int, dtype: torch.dtype, added: bool = True) -> dict[str, Any]:
    other = drawn(b, m, m)
    found: dict[str, Any] = {"x": drawn(b, m, k, dtype=dtype), "alpha": 0.5, "beta": -3.0}
    return found | {"added": (other + other.mT).to(dtype)} if added else found


def compare(found: dict[str, Any]) -> None:
    parity.check(partial(op.symmetric_product, impl="triton"), reference.symmetric_product, found)


@pytest.mark.sampled
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_newton_schulz_singular_values_approach_one(impl: str) -> None:
    g = drawn(2, 40, 24)
    for dtype in (torch.float32, torch.bfloat16):
        found = op.newton_schulz(g, dtype=dtype, impl=impl)
        values = torch.linalg.svdvals(found)
        assert found.shape == g.shape
        assert 0.6 < values.min() <= values.max() < 1.3
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    near = reference.newton_schulz(g)
    assert (torch.einsum("bmk,bmn,bkn->bk", u, near, v) > 0.6).all()
    for turned in (g, g.mT):
        found = op.newton_schulz(turned, dtype=torch.float32, impl=impl)
        torch.testing.assert_close(found, near if turned is g else near.mT, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 33, 70), (1, 66, 64), (2, 70, 7)])
def test_newton_schulz_symmetric_product_equals_definition(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    with parity.mutated(KERNELS, *SMALL_TILES):
        compare(inputs(*shape, dtype))
        compare(inputs(*shape, dtype, added=False))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_newton_schulz_many_columns_sum_in_fp32(impl: str) -> None:
    found = inputs(1, 8, 1536, torch.bfloat16, added=False)
    parity.check_format(
        partial(op.symmetric_product, impl=impl), reference.symmetric_product, found
    )


def test_newton_schulz_product_is_bitwise_symmetric() -> None:
    found = op.symmetric_product(drawn(2, 140, 90, dtype=torch.bfloat16), impl="triton")
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_newton_schulz_empty_product_is_empty(shape: tuple[int, int, int]) -> None:
    compare(inputs(*shape, torch.float32))
    assert op.newton_schulz(drawn(*shape), impl="triton").shape == shape


def test_newton_schulz_tiles_are_numbered_uniquely() -> None:
    """Number as many tiles as the largest matrices have, for which the root of a number is rounded
    in fp32.
    """
    for edge in (0, 3, 45, 181, 2047):
        first = max(edge * (edge + 1) // 2 - 4, 0)
        out = torch.empty(2, 8, dtype=torch.int32, device=DEVICE)
        place_kernel[(1,)](out, first, SIZE=8)
        for number, (row, column) in enumerate(out.T.tolist(), first):
            assert 0 <= column <= row
            assert row * (row + 1) // 2 + column == number


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if row != column:", "if row == column:"),
        ("tl.trans(y)", "y"),
        ("total *= alpha", "total *= 1.0"),
        ("total += beta *", "total += alpha *"),
        ("matrix * m * k", "0 * matrix * m * k"),
        ("here = i + inner < k", "here = inner < k"),
    ],
)
def test_newton_schulz_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.mutated(KERNELS, *SMALL_TILES), parity.caught(KERNELS, old, new):
        compare(inputs(2, 70, 90, torch.float32))


def test_newton_schulz_excess_matrices_take_several_launches() -> None:
    with parity.mutated(KERNELS, *SMALL_GRID):
        compare(inputs(5, 7, 9, torch.float32))
        with parity.caught(KERNELS, "y[part]", "y"):
            compare(inputs(5, 7, 9, torch.float32))


def test_newton_schulz_unfit_is_refused() -> None:
    with pytest.raises(ValueError, match="takes matrices"):
        op.newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) and torch.float32 \(2, 4, 4\)"):
        op.symmetric_product(torch.zeros(2, 3, 4), torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match=r"not torch.int64, torch.bfloat16, 5"):
        op.newton_schulz(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"torch.bfloat16, -1"):
        op.newton_schulz(torch.zeros(3, 3), steps=-1)
    with pytest.raises(ValueError, match="takes floats"):
        op.symmetric_product(torch.zeros(2, 3, 4, dtype=torch.int64))
    with pytest.raises(Unavailable, match="float64"):
        op.newton_schulz(torch.zeros(3, 3), dtype=torch.float64, impl="triton")


@pytest.mark.full
def test_newton_schulz_passes_torch_registration() -> None:
    from mtrain_kernels.newton_schulz.op import _symmetric_product

    square = drawn(2, 5, 5)
    torch.library.opcheck(_symmetric_product.op, (drawn(2, 5, 7), square + square.mT, 2.0, 1.0))
