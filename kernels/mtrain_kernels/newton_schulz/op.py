"""Newton-Schulz, and products of matrices with their own transposes: contract and registration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain_kernels.newton_schulz import reference
from mtrain_kernels.operators import float_obstacle, operator
from mtrain_kernels.registry import Case, Cost, Model, Op, pick


def newton_schulz(
    gradient: Tensor,
    *,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    impl: str = "auto",
) -> Tensor:
    """Return each matrix [..., m, n] with its singular values near 1, as Muon adds it to a weight;
    no gradients.

    Worked out in `dtype`; two of three products of a step are symmetric, and `triton` makes half of
    them. Raises `ValueError` for a tensor that is no matrix, `Unavailable` where the named
    implementation cannot run. See `reference.newton_schulz`.
    """
    if gradient.dim() < 2:
        raise ValueError(f"newton_schulz takes matrices, not {tuple(gradient.shape)}")
    if not (gradient.is_floating_point() and dtype.is_floating_point) or steps < 0:
        raise ValueError(
            f"newton_schulz takes floats and steps from 0, not {gradient.dtype}, {dtype}, {steps}"
        )
    gradient = gradient.detach()
    backend = pick("newton_schulz", impl, gradient.device, float_obstacle(dtype))
    if backend == "reference" or not gradient.numel():
        return reference.newton_schulz(gradient, steps, eps, dtype)
    a, b, c = reference.QUINTIC
    x, tall = reference.normed(gradient.reshape(-1, *gradient.shape[-2:]), eps, dtype)
    x = x.contiguous()
    for _ in range(steps):
        square = _symmetric_product(x, None, 1.0, 0.0)
        # `baddbmm` adds a X as it multiplies; the polynomial of the square is symmetric, too.
        x = torch.baddbmm(x, _symmetric_product(square, square, c, b), x, beta=a)
    return (x.mT if tall else x).reshape(gradient.shape).to(gradient.dtype)


def symmetric_product(
    x: Tensor,
    added: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """Compute `alpha X X^T + beta C`, with sums in fp32; no gradients; `added`, C, has to be
    symmetric.

    Shapes and dtypes are those of `reference.symmetric_product`. Raises `ValueError` where they do
    not fit, `Unavailable` where the named implementation cannot run.
    """
    square = (x.shape[0], x.shape[1], x.shape[1]) if x.dim() == 3 else None
    alike = added is None or (added.shape == square and added.dtype == x.dtype)
    if square is None or not x.is_floating_point() or not alike:
        other = "" if added is None else f" and {added.dtype} {tuple(added.shape)}"
        raise ValueError(
            f"symmetric_product takes floats [b, m, k] and [b, m, m], not {x.dtype}"
            f" {tuple(x.shape)}{other}"
        )
    x = x.detach()
    added = None if added is None else added.detach()
    if pick("newton_schulz", impl, x.device, float_obstacle(x)) == "reference":
        return reference.symmetric_product(x, added, alpha, beta)
    return _symmetric_product(x, added, float(alpha), float(beta))


@operator("symmetric_product", shapes=lambda x: x.new_empty((x.shape[0], x.shape[1], x.shape[1])))
def _symmetric_product(x: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    from mtrain_kernels.newton_schulz import triton

    return triton.symmetric_product(x, added, alpha, beta)


def _make(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "x": torch.randn(1, model.hidden, model.ffn, device=device, dtype=dtype) * model.ffn**-0.5
    }


def _cost(model: Model) -> Cost:
    m = model.hidden
    k = model.ffn
    # Half of 2 m^2 k: tiles above the diagonal are copies.
    return Cost(bytes=2 * (m * k + m * m), flops=m * (m + 1) * k)


def _launch(model: Model) -> None:
    from mtrain_kernels.newton_schulz import triton

    x = torch.empty(1, model.hidden, model.ffn, dtype=torch.bfloat16, device="meta")
    square = triton.symmetric_product(x, None, 1.0, 0.0)
    triton.symmetric_product(square, square, 1.0, 1.0)


OPS = (
    Op(
        "newton_schulz",
        cases=(
            Case(
                "symmetric_product",
                _make,
                lambda inputs, impl: symmetric_product(**inputs, impl=impl),
                forward=_cost,
            ),
        ),
        launch=_launch,
    ),
)
