"""The norms against the formula written out in fp64."""

from __future__ import annotations

import pytest
import torch
from mtrain_kernels.norm.reference import layer_norm, rms_norm
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [(1,), (7,), (3, 1), (5, 17), (2, 3, 64), (0, 8), (2, 0, 8)]


def _by_hand(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, rms: bool
) -> Tensor:
    x = x.double()
    w = weight.double() + (1 if centered else 0)
    shifted = x if rms else x - x.sum(-1, keepdim=True) / x.shape[-1]
    y = shifted / ((shifted * shifted).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * w
    return y if bias is None else y + bias.double()


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    width = shape[-1:]
    return [
        torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_()
        for s in (shape, width, width)
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norm_reference_equals_formula_with_gradients(
    kind: str, centered: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, bias = _inputs(shape, dtype)
    used_bias = bias if kind.endswith("bias") else None
    if kind == "rms":
        y = rms_norm(x, weight, 1e-3, zero_centered=centered)
    else:
        y = layer_norm(x, weight, used_bias, 1e-3, zero_centered=centered)
    expected = _by_hand(x, weight, used_bias, 1e-3, centered, kind == "rms")
    assert y.dtype == dtype
    leaves = [x, weight, *([bias] if used_bias is not None else [])]
    direction = torch.randn(y.shape, dtype=torch.float64)
    found = torch.autograd.grad((y.double() * direction).sum(), leaves)
    wanted = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


def test_norm_reference_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 10).transpose(0, 1)[:, ::2, ::2]
    weight = torch.randn(10)[::2]
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight.contiguous(), 1e-5)
    )


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(4, 4), torch.ones(1)])
def test_norm_reference_other_width_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="last axis"):
        rms_norm(torch.ones(2, 4), weight, 1e-5)
    with pytest.raises(ValueError, match="last axis"):
        layer_norm(torch.ones(2, 4), weight, None, 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(3), 1e-5)
