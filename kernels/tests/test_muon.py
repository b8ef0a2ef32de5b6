"""Muon: orthogonal updates of matrices, three of a fused one, and AdamW for the other
parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mtrain_kernels.optimizer.fused_adam import FusedAdam
from mtrain_kernels.optimizer.muon import MOMENTUM, Muon
from torch import Tensor, nn

EXACT = {"ns_dtype": torch.float32, "weight_decay": 0.0}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(
    matrix: Tensor, kind: str = "whole", gradient: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the update of a matrix in one step of rate 1."""
    param = nn.Parameter(matrix.clone())
    param.grad = drawn(*matrix.shape, seed=1) if gradient is None else gradient
    Muon([{"params": [param], "matrix": kind}], 1.0, impl="reference", **(EXACT | options)).step()
    return param.detach() - matrix


@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        ("spectral", 40**0.5),
        ("shape_scaling", (40 / 10) ** 0.5),
        ("unit_rms_norm", (40 / 10) ** 0.5),
    ],
)
def test_muon_update_has_scaled_singular_values(mode: str, scale: float) -> None:
    values = torch.linalg.svdvals(
        moved(torch.zeros(40, 10), scale_mode=mode, extra_scale_factor=0.5)
    ) / (scale * 0.5)
    assert 0.6 < values.min() < values.max() < 1.3


def test_muon_wide_matrix_scales_by_its_shape() -> None:
    sizes = {
        mode: moved(torch.zeros(10, 40), scale_mode=mode).norm()
        for mode in ("shape_scaling", "unit_rms_norm")
    }
    assert sizes["unit_rms_norm"] / sizes["shape_scaling"] == pytest.approx(0.5, rel=1e-5)


def test_muon_nesterov_mixes_momentum_and_gradient() -> None:
    start = drawn(6, 8)
    first = drawn(6, 8, seed=1)
    second = drawn(6, 8, seed=2)
    for nesterov in (False, True):
        param = nn.Parameter(start.clone())
        group = [{"params": [param], "matrix": "whole"}]
        muon = Muon(group, 1.0, momentum=0.9, use_nesterov=nesterov, impl="reference", **EXACT)
        for gradient in (first, second):
            before = param.detach().clone()
            param.grad = gradient
            muon.step()
        average = 0.1 * second + 0.9 * 0.1 * first
        torch.testing.assert_close(muon.state[param][MOMENTUM], average)
        used = 0.1 * second + 0.9 * average if nesterov else average
        # an average of one gradient is that gradient, but for a factor that orthogonalising takes
        # away
        torch.testing.assert_close(
            param.detach() - before, moved(torch.zeros(6, 8), gradient=used), rtol=1e-3, atol=1e-4
        )


def test_muon_qkv_are_three_matrices() -> None:
    rows = (4, 2, 2)
    groups = 3
    width = 10
    gradient = drawn(groups * sum(rows), width, seed=1)
    fused = moved(torch.zeros_like(gradient), "qkv", gradient, qkv_rows=rows)
    whole = moved(torch.zeros_like(gradient), "whole", gradient, qkv_rows=rows)
    parts = gradient.view(groups, sum(rows), width).split(rows, dim=1)
    found = fused.view(groups, sum(rows), width).split(rows, dim=1)
    for part, update in zip(parts, found, strict=True):
        alone = part.reshape(-1, width)
        torch.testing.assert_close(
            update.reshape(-1, width), moved(torch.zeros_like(alone), gradient=alone)
        )
    assert (fused - whole).norm() > 0.1 * whole.norm()


def test_muon_group_may_have_own_rows() -> None:
    gradient = drawn(24, 10, seed=1)
    ends = []
    for of_all, own in (((2, 2, 2), {}), ((4, 2, 2), {"qkv_rows": (2, 2, 2)})):
        param = nn.Parameter(torch.zeros_like(gradient))
        param.grad = gradient
        Muon(
            [{"params": [param], "matrix": "qkv", **own}],
            1.0,
            impl="reference",
            qkv_rows=of_all,
            **EXACT,
        ).step()
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_muon_reordered_rows_update_in_order() -> None:
    gradient = drawn(12, 5, seed=1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    zero = torch.zeros_like(gradient)
    torch.testing.assert_close(
        moved(zero, gradient=gradient[order]), moved(zero, gradient=gradient)[order]
    )


def test_muon_weight_decay_follows_rate_only() -> None:
    matrix = drawn(6, 6)
    torch.testing.assert_close(
        moved(matrix, weight_decay=0.25) - moved(matrix), -0.25 * matrix, rtol=1e-4, atol=1e-5
    )


def test_muon_gradient_factor_reaches_average() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    gradient = drawn(4, 4)
    param.grad = gradient
    muon = Muon([{"params": [param], "matrix": "whole"}], impl="reference", **EXACT)
    muon.step(grad_scale=torch.tensor(0.5))
    torch.testing.assert_close(muon.state[param][MOMENTUM], 0.05 * 0.5 * gradient)


def test_muon_other_tensors_take_adamw_and_resume() -> None:
    def trained(
        cls: type[FusedAdam], steps: int, state: Any = None, at: list[Tensor] | None = None
    ) -> Any:
        params = [nn.Parameter(p.clone()) for p in at or [drawn(6, 4), drawn(7)]]
        groups = [
            {"params": params[:1], "matrix": "whole" if cls is Muon else ""},
            {"params": params[1:]},
        ]
        optimizer = cls(groups, 0.1, impl="reference")
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        first = 0 if state is None else optimizer.param_groups[0]["step"]
        for step in range(first, first + steps):
            for param in params:
                param.grad = drawn(*param.shape, seed=step)
            optimizer.step()
        return [p.detach() for p in params], optimizer.state_dict()

    (matrix, vector), _ = trained(Muon, 4)
    (by_adam, same), _ = trained(FusedAdam, 4)
    assert torch.equal(vector, same)
    assert not torch.equal(matrix, by_adam)
    halfway, state = trained(Muon, 2)
    resumed, _ = trained(Muon, 2, state, halfway)
    assert torch.equal(resumed[0], matrix)
    assert torch.equal(resumed[1], vector)


def test_muon_impossible_is_refused() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    for wrong in ({"momentum": 1.0}, {"num_ns_steps": 0}, {"scale_mode": "none"}):
        with pytest.raises(ValueError, match="out of range"):
            Muon([param], **wrong)
