"""The linear layer of a CPU against products in fp64."""

from __future__ import annotations

import pytest
import torch
from mtrain_kernels import linear as module
from mtrain_kernels.linear import fits, linear, product
from torch import Tensor
from torch.nn import functional as F

SIZES = [(3, 5, 7, 11), (64, 4, 256, 320), (1, 513, 129, 257)]


def _inputs(s: int, b: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((s, b, k), (n, k), (n,))]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_product(
    sizes: tuple[int, int, int, int], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    x, weight, bias = _inputs(*sizes, torch.float32)
    assert fits(x, weight)
    given = [x, weight, bias] if with_bias else [x, weight]
    exact = [t.detach().double().requires_grad_() for t in given]
    y, right = linear(*given), F.linear(*exact)
    dy = torch.randn(y.shape)
    found, expected = torch.autograd.grad(y, given, dy), torch.autograd.grad(right, exact, dy.double())
    for mine, wanted in zip((y, *found), (right, *expected), strict=True):
        assert (mine.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_operands_may_be_transposed_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    torch.manual_seed(0)
    left, right = torch.randn(96, 80), torch.randn(96, 72)
    wanted = left.double().t() @ right.double()
    assert (product(left.t(), right.t()).double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_only_large_products_in_fp32_on_a_cpu_leave_torchs_way() -> None:
    large, small = torch.zeros(512, 512), torch.zeros(8, 8)
    assert fits(large, large)
    assert not fits(small, small)
    assert not fits(large.bfloat16(), large.bfloat16())
    assert not fits(large.double(), large.double())
    assert not fits(large.to("meta"), large.to("meta"))


def test_a_frozen_weight_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    x, weight, _ = _inputs(4, 4, 16, 16, torch.float32)
    linear(x, weight.detach()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
