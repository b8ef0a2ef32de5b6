"""The harness itself: rounding, poison, seeded bugs, and errors that it must see."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from mtrain_kernels import parity
from mtrain_kernels.runtime import as_rows, cast, power_of_two, to_bf16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = to_bf16(x) if TWICE else cast(x, y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=at < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parity_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,)).to(torch.int32)
    ties = (torch.arange(1 << 14) << 18 | 0x8000).to(torch.int32)
    x = torch.cat((bits, ties)).view(torch.float32).to(DEVICE)
    y = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(1,)](x, y, x.numel(), power_of_two(x.numel()), dtype == torch.bfloat16)
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_parity_poison_fills_and_goes_away() -> None:
    x = torch.ones(3)
    with parity.poisoned():
        for empty in (
            torch.empty(5),
            torch.empty_like(x),
            x.new_empty(4),
            torch.empty_strided((2, 2), (2, 1)),
        ):
            assert empty.isnan().all()
        assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_parity_unwritten_tail_is_found() -> None:
    def short(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:-1] = x[:-1]
        return y

    parity.check(torch.clone, torch.clone, {"x": torch.randn(5)})
    with pytest.raises(AssertionError, match="output 0: nan instead of"):
        parity.check(short, torch.clone, {"x": torch.randn(5)})


def test_parity_half_accumulation_is_found() -> None:
    torch.manual_seed(0)
    x = torch.randn(1536, 8).bfloat16().requires_grad_()
    w = (0.01 * torch.randn(8)).bfloat16().requires_grad_()

    def wide(x: Tensor, w: Tensor) -> Tensor:
        inner = torch.promote_types(x.dtype, torch.float32)
        return (x.to(inner) * (1 + w.to(inner))).to(x.dtype)

    def late(x: Tensor, w: Tensor) -> Tensor:
        return (x.float() * (1 + w)).to(x.dtype)

    parity.check_format(wide, wide, {"x": x, "w": w})
    parity.check(late, wide, {"x": x, "w": w})
    with pytest.raises(AssertionError, match="output 0"):
        parity.check_format(late, wide, {"x": x, "w": w})

    class AddedUp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
            return x + w

        @staticmethod
        def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
            return dy, functools.reduce(torch.add, dy)

    with pytest.raises(AssertionError, match="gradient of w"):
        parity.check_format(lambda x, w: AddedUp.apply(x, w), lambda x, w: x + w, {"x": x, "w": w})
    with pytest.raises(AssertionError, match="output 0"):  # what broadcasts is not what is wanted
        parity.check_format(
            lambda x, w: wide(x, w)[:1], lambda x, w: wide(x[:1].expand_as(x), w), {"x": x, "w": w}
        )
    with pytest.raises(AssertionError, match="no input is in half precision"):
        parity.check_format(wide, wide, {"x": x.detach().float(), "w": w.detach().float()})


def test_parity_wrong_gradient_and_shape_are_found() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(AssertionError, match="gradient of x"):
        parity.check(lambda x: x.detach() + 0 * x, torch.clone, {"x": x})
    with pytest.raises(AssertionError, match=r"shape \(3, 4\) instead of \(4, 3\)"):
        parity.check(lambda x: x.T, torch.clone, {"x": x})
    with pytest.raises(AssertionError, match="should be infinite"):
        parity.check(
            lambda x: x.nan_to_num(), torch.clone, {"x": torch.tensor([float("inf"), 1.0])}
        )
    with pytest.raises(AssertionError, match="times the tolerance"):
        parity.check(lambda x: x * (1 + 1e-4), torch.clone, {"x": x})
    with pytest.raises(AssertionError, match="output 0"):
        parity.check(lambda x: x * (1 + 1e-6), torch.clone, {"x": x}, exact=True)


def test_parity_layouts_keep_values_with_other_strides() -> None:
    x = torch.randn(3, 4, 5, requires_grad=True)
    found = dict(parity.layouts(x))
    assert len({x.stride(), *(y.stride() for y in found.values())}) == 4
    assert all(torch.equal(x, y) and y.requires_grad for y in found.values())


def test_parity_rows_are_views_where_possible() -> None:
    x = torch.randn(4, 6, 10)
    assert as_rows(x[..., :7], 7).data_ptr() == x.data_ptr()
    assert as_rows(x.transpose(0, 1), 10).shape == (24, 10)
    assert as_rows(x[..., ::2], 5).stride(-1) == 1
    assert as_rows(torch.empty(2, 0), 0).shape[1] == 0


def test_parity_mutant_must_differ_and_be_found() -> None:
    module = "mtrain_kernels.norm.triton"
    with (
        pytest.raises(AssertionError, match="no mutant"),
        parity.mutated(module, "no such line", ""),
    ):
        pass
    with (
        pytest.raises(AssertionError, match="nobody noticed"),
        parity.caught(module, "weight += 1.0", "weight += 2.0"),
    ):
        pass
