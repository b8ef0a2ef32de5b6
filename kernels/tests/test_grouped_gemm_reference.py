"""The grouped linear layer against sums written out in fp64."""

from __future__ import annotations

import pytest
import torch
from mtrain_kernels.grouped_gemm.reference import grouped_linear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [[1], [3, 0, 2], [0, 0], [7, 1, 5, 0]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_grouped_gemm_equals_sums_with_gradients(
    with_bias: bool, rows: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = 5
    outputs = 3
    groups = range(len(rows))
    x = torch.randn(sum(rows), inputs, dtype=torch.float64).to(dtype).requires_grad_()
    weights = [
        torch.randn(outputs, inputs, dtype=torch.float64).to(dtype).requires_grad_() for _ in groups
    ]
    biases = [torch.randn(outputs, dtype=torch.float64).to(dtype).requires_grad_() for _ in groups]
    y = grouped_linear(x, weights, rows, biases if with_bias else None)
    owner = [g for g in groups for _ in range(rows[g])]
    expected = torch.zeros(sum(rows), outputs, dtype=torch.float64)
    for r, g in enumerate(owner):
        expected[r] = (weights[g].double() * x[r].double()).sum(-1) + (
            biases[g].double() if with_bias else 0
        )
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
    )
    direction = torch.randn(y.shape, dtype=torch.float64)
    leaves = [x, *weights, *(biases if with_bias else [])]
    found = torch.autograd.grad((y.double() * direction).sum(), leaves)
    for g in groups:
        mine = [r for r, o in enumerate(owner) if o == g]
        wanted = direction[mine].T @ x.detach().double()[mine]
        torch.testing.assert_close(
            found[1 + g].double(), wanted, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype]
        )
    for r, g in enumerate(owner):
        wanted = direction[r] @ weights[g].detach().double()
        torch.testing.assert_close(
            found[0][r].double(), wanted, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype]
        )


def test_grouped_gemm_empty_group_gets_a_gradient() -> None:
    weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    grouped_linear(torch.ones(4, 3), weights, [4, 0]).sum().backward()
    assert weights[1].grad is not None
    assert torch.equal(weights[1].grad, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("rows", "biases"), [([2, 1], None), ([4], None), ([2, 2], [torch.ones(2)])]
)
def test_grouped_gemm_unfit_counts_are_refused(
    rows: list[int], biases: list[torch.Tensor] | None
) -> None:
    with pytest.raises(ValueError, match=r"rows|biases"):
        grouped_linear(torch.ones(4, 3), [torch.ones(2, 3)] * 2, rows, biases)
