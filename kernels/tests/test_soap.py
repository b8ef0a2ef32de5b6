"""SOAP: the paper's steps in fp64, sides without a basis, and AdamW for other parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtrain_kernels.optimizer.fused_adam import FusedAdam
from mtrain_kernels.optimizer.soap import Soap
from torch import Tensor, nn

LR = 0.1
BETA1 = 0.9
BETA2 = 0.95
SHAMPOO = 0.8
EPS = 1e-8
DECAY = 0.01
STEPS = 8
EVERY = 3


def gradients(rows: int, columns: int, steps: int = STEPS) -> list[Tensor]:
    """Return gradients of a spectrum whose directions are far apart, so that eigenvectors are too:
    fp64.
    """
    draw = torch.Generator().manual_seed(rows + columns)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    left = torch.linalg.qr(noise(rows, rows)).Q
    right = torch.linalg.qr(noise(columns, columns)).Q
    tall, wide = (1.3 ** -torch.arange(n, dtype=torch.float64) for n in (rows, columns))
    return [left @ (tall[:, None] * noise(rows, columns) * wide) @ right.T for _ in range(steps)]


def plain(
    weight: Tensor, grads: list[Tensor], sides: tuple[bool, bool] = (True, True)
) -> tuple[Tensor, Tensor]:
    """Run algorithm 3 of arXiv 2409.11321 in fp64, and return its second moment, too: the first
    step only makes the bases.
    """
    w = weight.double()
    m = torch.zeros_like(weight.double())
    v = torch.zeros_like(weight.double())
    grams = [torch.zeros(n, n, dtype=torch.float64) for n in w.shape]
    bases = [torch.eye(n, dtype=torch.float64) for n in w.shape]
    for t, g in enumerate(grads):
        if t:
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * (bases[0].T @ g @ bases[1]) ** 2
            turned = bases[0].T @ m @ bases[1] / (1 - BETA1**t)
            step = bases[0] @ (turned / ((v / (1 - BETA2**t)).sqrt() + EPS)) @ bases[1].T
            w = w - LR * DECAY * w - LR * step
        for side, product in enumerate((g @ g.T, g.T @ g)):
            grams[side] = SHAMPOO * grams[side] + (1 - SHAMPOO) * product
            if t == 0 and sides[side]:
                rows, _, columns = torch.linalg.svd(g, full_matrices=False)
                bases[side] = torch.linalg.qr((rows, columns.T)[side], mode="complete").Q
            elif t % EVERY == 0 and sides[side]:
                found = torch.diagonal(bases[side].T @ grams[side] @ bases[side])
                order = torch.sort(found, descending=True).indices
                v = v[order] if side == 0 else v[:, order]
                bases[side] = torch.linalg.qr(grams[side] @ bases[side][:, order]).Q
    return w, v


def trained(weight: Tensor, grads: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    param = nn.Parameter(weight.clone())
    keys = {
        "shampoo_beta": SHAMPOO,
        "precondition_frequency": EVERY,
        "betas": (BETA1, BETA2),
        "weight_decay": DECAY,
    }
    soap = Soap(
        [{"params": [param], "matrix": "whole"}],
        LR,
        eps=EPS,
        impl="reference",
        **(keys | options),
    )
    for grad in grads:
        param.grad = grad.float()
        soap.step()
    return param.detach(), soap.state[param]["exp_avg_sq"]


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 4), (4, 9)])
def test_soap_steps_equal_paper(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    grads = gradients(rows, columns)
    found = trained(weight, grads)
    expected = plain(weight, grads)
    assert _off(found[0] - weight, expected[0] - weight) < 1e-4
    assert _off(found[1], expected[1]) < 1e-4
    later = trained(weight, grads, precondition_frequency=EVERY + 1)[0]
    assert _off(later - weight, expected[0] - weight) > 1e-2, "a basis that follows later is found"


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_soap_long_sides_have_no_basis() -> None:
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    grads = gradients(9, 4)
    one = plain(weight, grads, (False, True))
    assert _off(trained(weight, grads, max_precond_dim=8)[0] - weight, one[0] - weight) < 1e-4
    param = nn.Parameter(weight.clone())
    adam = FusedAdam(
        [param], LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, impl="reference"
    )
    for grad in grads[1:]:
        param.grad = grad.float()
        adam.step()
    torch.testing.assert_close(
        trained(weight, grads, max_precond_dim=3)[0], param.detach(), rtol=1e-4, atol=1e-5
    )


def test_soap_rotated_gradients_rotate_update() -> None:
    grads = gradients(6, 6)
    draw = torch.Generator().manual_seed(5)
    left, right = (
        torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64)).Q for _ in range(2)
    )
    zero = torch.zeros(6, 6)
    alone = {"weight_decay": 0.0}
    turned = trained(zero, [left @ grad @ right.T for grad in grads], **alone)[0].double()
    assert _off(left.T @ turned @ right, trained(zero, grads, **alone)[0].double()) < 1e-4


def test_soap_other_tensors_take_adamw() -> None:
    ends = []
    for cls in (Soap, FusedAdam):
        param = nn.Parameter(torch.ones(7))
        optimizer = cls([{"params": [param]}], 0.1, impl="reference")
        for step in range(3):
            param.grad = torch.randn(7, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(param.detach())
    assert torch.equal(*ends)


def test_soap_zero_gradient_begins_with_identity_basis() -> None:
    grads = [torch.zeros(4, 6, dtype=torch.float64), *gradients(4, 6, 2)]
    adam = trained(torch.zeros(4, 6), grads, max_precond_dim=3, precondition_frequency=9)[0]
    torch.testing.assert_close(trained(torch.zeros(4, 6), grads, precondition_frequency=9)[0], adam)


def test_soap_unresolved_fp32_keeps_basis() -> None:
    """Take two gradients of few directions that differ in their last digits: the step after them is
    the same.
    """
    few = gradients(8, 8, 1)[0][:, :3] @ gradients(8, 8, 1)[0][:3]
    noise = gradients(8, 8, 2)
    ends = [
        trained(torch.zeros(8, 8), [few + 1e-7 * noise[i], noise[0]], weight_decay=0.0)[0]
        for i in (0, 1)
    ]
    assert _off(ends[0], ends[1].double()) < 1e-3


def test_soap_nan_gradient_shows_in_weights() -> None:
    grads = gradients(6, 6, 3)
    grads[0][2, 3] = torch.nan
    assert trained(torch.ones(6, 6), grads)[0].isnan().all()


def test_soap_impossible_is_refused() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    for wrong in ({"shampoo_beta": 1.0}, {"precondition_frequency": 0}, {"max_precond_dim": 0}):
        with pytest.raises(ValueError, match="out of range"):
            Soap([param], **wrong)
    with pytest.raises(ValueError, match="without a gradient"):
        Soap([{"params": [param], "matrix": "whole"}], impl="reference").step()
