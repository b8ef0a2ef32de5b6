"""The linear layer of a CPU against products in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mtrain_kernels import linear as module
from mtrain_kernels.linear import add_weight_gradient, faster, fits, linear, product, use
from torch import Tensor
from torch.nn import functional as F

SIZES = [(3, 5, 7, 11), (64, 4, 256, 320), (1, 513, 129, 257)]


@pytest.fixture(autouse=True)
def onednn() -> Iterator[None]:
    before = module._library
    use("onednn")
    yield
    use(before)


def _inputs(s: int, b: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in ((s, b, k), (n, k), (n,))]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_product_with_gradients(
    sizes: tuple[int, int, int, int], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    x, weight, bias = _inputs(*sizes, torch.float32)
    assert fits(x, weight)
    given = [x, weight, bias] if with_bias else [x, weight]
    exact = [t.detach().double().requires_grad_() for t in given]
    y = linear(*given)
    right = F.linear(*exact)
    dy = torch.randn(y.shape)
    found = torch.autograd.grad(y, given, dy)
    expected = torch.autograd.grad(right, exact, dy.double())
    for mine, wanted in zip((y, *found), (right, *expected), strict=True):
        assert (mine.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_linear_operands_may_be_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    torch.manual_seed(0)
    left = torch.randn(96, 80)
    right = torch.randn(96, 72)
    wanted = left.double().t() @ right.double()
    assert (product(left.t(), right.t()).double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_linear_only_large_fp32_on_cpu_leaves_torch() -> None:
    large = torch.zeros(512, 512)
    small = torch.zeros(8, 8)
    assert fits(large, large)
    assert not fits(small, small)
    assert not fits(large.bfloat16(), large.bfloat16())
    assert not fits(large.double(), large.double())
    assert not fits(large.to("meta"), large.to("meta"))


def test_linear_frozen_weight_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    x, weight, _ = _inputs(4, 4, 16, 16, torch.float32)
    linear(x, weight.detach()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_linear_weight_gradient_accumulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 1)
    torch.manual_seed(0)
    dy = torch.randn(40, 24)
    x = torch.randn(40, 16)
    wanted = torch.ones(24, 16).double() + dy.double().t() @ x.double()
    for library in ("blas", "onednn"):
        module.use(library)
        for into in (torch.ones(24, 16), torch.ones(16, 24).t(), torch.ones(16, 30).t()[:24]):
            add_weight_gradient(into, dy, x)
            assert (into.double() - wanted).norm() <= 1e-6 * wanted.norm(), (library, into.stride())


def test_linear_faster_library_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module.use("blas")
    clock = {"now": 0.0}
    rates = {"blas": 1.0, "onednn": 3.0}

    def slow(*_: Any) -> None:
        clock["now"] += 1 / rates[module._library]

    monkeypatch.setattr(module, "product", slow)
    monkeypatch.setattr(module, "add_weight_gradient", slow)
    monkeypatch.setattr(module.time, "process_time", lambda: clock["now"])
    assert faster() == ("onednn", pytest.approx(3.0))
    rates["onednn"] = 1.05  # within the noise: torch's own way
    assert faster()[0] == "blas"
    rates["onednn"] = 0.5
    assert faster() == ("blas", pytest.approx(0.5))
    assert module._library == "blas", "measuring does not choose"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_half_gradients_accumulate_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy = torch.randn(33, 7).to(dtype)
    x = torch.randn(33, 11).to(dtype)
    into = torch.randn(7, 11)
    wanted = into.double() + dy.double().t() @ x.double()
    added = into.clone()
    rounded = into + dy.t() @ x
    add_weight_gradient(added, dy, x)
    assert (added.double() - wanted).norm() <= 1e-6 * wanted.norm()
    assert (rounded.double() - wanted).norm() > 1e-4 * wanted.norm(), (
        "rounding the product would pass, too"
    )
