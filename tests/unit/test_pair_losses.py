"""Losses of pairs against their formulas, restated here in fp64 on random batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.train.objectives.dpo import Dpo
from mtrain.train.objectives.ipo import Ipo
from mtrain.train.objectives.kto import Kto
from mtrain.train.objectives.orpo import Orpo
from mtrain.train.objectives.reward import Reward
from mtrain.train.objectives.simpo import Simpo
from mtrain.train.pairs import PairObjective, pairs_of

BETA = 0.3
SMOOTHING = 0.1
Z = 0.9


def sig(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def of_a_pair(name: str, c: Tensor, r: Tensor, n: int, m: int) -> Tensor:
    """Return the loss of one pair from the definition in the paper.

    `c` and `r` are log-ratios (log-probabilities without a reference) of the chosen and rejected
    answer, summed over their `n` and `m` tokens.
    """
    b = BETA
    e = SMOOTHING
    if name == "sigmoid":  # arXiv:2305.18290, equation 7; TRL 1.16 with label_smoothing
        return -(1 - e) * torch.log(sig(b * (c - r))) - e * torch.log(sig(b * (r - c)))
    if name == "sigmoid_norm":  # arXiv:2411.15124, section 5.1
        d = c / n - r / m
        return -(1 - e) * torch.log(sig(b * d)) - e * torch.log(sig(-b * d))
    if name == "hinge":  # arXiv:2305.10425, equation 10
        return torch.clamp(1 - b * (c - r), min=0)
    if name == "ipo":  # arXiv:2310.12036, equation 17, of means over tokens
        return (c / n - r / m - 1 / (2 * b)) ** 2
    if name == "robust":  # arXiv:2403.00409, equation 12
        right = torch.log(sig(b * (c - r)))
        wrong = torch.log(sig(b * (r - c)))
        return (-(1 - e) * right + e * wrong) / (1 - 2 * e)
    if name == "apo_zero":  # arXiv:2408.06266, equation 6
        return 1 - sig(b * c) + sig(b * r)
    if name == "apo_down":  # arXiv:2408.06266, equation 7
        return sig(b * c) + 1 - sig(b * (c - r))
    if name == "kto":  # arXiv:2402.01306, equation 8, lambda 1.3 and 0.7, of a pair's two answers
        return (1.3 * (1 - sig(b * (c - Z))) + 0.7 * (1 - sig(b * (Z - r)))) / 2
    if name == "orpo":  # arXiv:2403.07691, equations 4 to 7
        p = torch.exp(c / n)
        q = torch.exp(r / m)
        return -(c / n) - b * torch.log(sig(torch.log(p / (1 - p)) - torch.log(q / (1 - q))))
    if name == "reward":  # TRL 1.16's RewardTrainer, with center_rewards_coefficient
        return -torch.log(sig(c - r)) + 0.02 * (c + r) ** 2
    assert name == "simpo"  # arXiv:2405.14734, equation 6
    return -torch.log(sig(b / n * c - b / m * r - 0.7))


CASES: dict[str, tuple[type[PairObjective], dict[str, Any]]] = {
    **{
        kind: (Dpo, {"name": "dpo", "loss_type": kind, "label_smoothing": SMOOTHING})
        for kind in ("sigmoid", "sigmoid_norm", "hinge", "robust", "apo_zero", "apo_down")
    },
    "ipo": (Ipo, {"name": "ipo"}),
    "dpo_ipo": (Dpo, {"name": "dpo", "loss_type": "ipo"}),
    "rpo": (Dpo, {"name": "dpo", "loss_type": "sigmoid", "nll_weight": 0.8}),
    "kto": (Kto, {"name": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "orpo": (Orpo, {"name": "orpo"}),
    "simpo": (Simpo, {"name": "simpo", "gamma": 0.7}),
    "reward": (Reward, {"name": "reward", "center_weight": 0.02}),
}


def wanted(name: str, lp: Tensor, ref: Tensor | None, mask: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for k in range(0, len(lp), 2):
        n, m = (int(mask[k + i].sum()) for i in (0, 1))
        policy = [sum(lp[k + i, t] for t in range(lp.shape[1]) if mask[k + i, t]) for i in (0, 1)]
        c, r = policy
        if ref is not None:
            c, r = (
                p - sum(ref[k + i, t] for t in range(lp.shape[1]) if mask[k + i, t])
                for i, p in enumerate(policy)
            )
        if name == "rpo":  # arXiv:2404.19733, equation 3
            total = total - torch.log(sig(BETA * (c - r))) - 0.8 * policy[0] / n
        else:
            total = total + of_a_pair(name.removeprefix("dpo_"), c, r, n, m)
    return total


@pytest.mark.parametrize("batches", [2, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_pair_losses_equal_their_formulas(name: str, dtype: torch.dtype, batches: int) -> None:
    kind, keys = CASES[name]
    objective = kind(SimpleNamespace(objective=ObjectiveConfig(beta=BETA, **keys)))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    for _ in range(batches):
        lp = -3 * torch.rand((4, 5), generator=generator, dtype=dtype) - 0.01
        ref = -3 * torch.rand((4, 5), generator=generator, dtype=dtype)
        mask = torch.rand((4, 5), generator=generator) > 0.4
        mask[:, 2] = True
        reference = None if name in ("orpo", "simpo", "reward") else ref
        lp.requires_grad_()
        pairs = pairs_of(lp, mask.float(), reference)._replace(baseline=Z)
        found = objective.compare(pairs).losses.sum()
        (gradient,) = torch.autograd.grad(found, lp)
        exact = lp.detach().double().requires_grad_()
        loss = wanted(name, exact, None if reference is None else ref.double(), mask)
        (slope,) = torch.autograd.grad(loss, exact)
        assert float(found) == pytest.approx(float(loss), rel=1e-6, abs=1e-6)
        assert torch.allclose(gradient.double(), slope, rtol=1e-6, atol=1e-6)


def test_pair_losses_of_equal_models_is_log_two() -> None:
    lp = -torch.rand((6, 4))
    section = ObjectiveConfig(name="dpo", beta=BETA, loss_type="sigmoid")
    objective = Dpo(SimpleNamespace(objective=section))  # type: ignore[arg-type]
    pairs = pairs_of(lp, torch.ones(6, 4), lp)
    assert objective.compare(pairs).losses.tolist() == pytest.approx([math.log(2)] * 3)
