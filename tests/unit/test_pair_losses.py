"""Losses of answers against their formulas, restated here in fp64, and against TRL's own code, on
200 random batches of two pairs each; a batch is a sum, so all 200 are computed at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
from mtrain.train.pairs import PairObjective, pairs_of, sums_of

BETA = 0.3
SMOOTHING = 0.1
GAMMA = 0.7
Z = 0.9
WEIGHTS = (1.3, 0.7)
ROWS = 4 * 200


def sig(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def of_pairs(name: str, lp: Tensor, ref: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """Return the loss of each pair from the definition in the paper."""
    n = mask.sum(-1)[::2]
    m = mask.sum(-1)[1::2]
    policy = (lp * mask).sum(-1)
    ratio = policy - (ref * mask).sum(-1)
    c = ratio[::2]
    r = ratio[1::2]
    x = policy[::2] / n
    y = policy[1::2] / m
    b = BETA
    e = smoothing
    if name == "sigmoid":  # arXiv:2305.18290, equation 7
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
    if name == "rpo":  # arXiv:2404.19733, equation 3
        return -torch.log(sig(b * (c - r))) - 0.8 * x
    if name == "orpo":  # arXiv:2403.07691, equations 4 to 7
        p = torch.exp(x)
        q = torch.exp(y)
        return -x - b * torch.log(sig(torch.log(p / (1 - p)) - torch.log(q / (1 - q))))
    if name == "listed":  # a weighted sum, as arXiv:2411.10442
        kinds = zip(LISTED["loss_type"], LISTED["loss_weights"], strict=True)
        return sum(w * of_pairs(k, lp, ref, mask, e) for k, w in kinds)
    if name == "reward":  # TRL 1.16's RewardTrainer, with center_rewards_coefficient
        c = policy[::2]
        r = policy[1::2]
        return -torch.log(sig(c - r)) + 0.02 * (c + r) ** 2
    assert name == "simpo"  # arXiv:2405.14734, equation 6
    return -torch.log(sig(b * x - b * y - GAMMA))


CASES: dict[str, tuple[type[PairObjective], dict[str, Any]]] = {
    **{
        kind: (Dpo, {"name": "dpo", "loss_type": kind})
        for kind in ("sigmoid", "sigmoid_norm", "hinge", "robust", "apo_zero", "apo_down")
    },
    "ipo": (Ipo, {"name": "ipo"}),
    "rpo": (Dpo, {"name": "dpo", "loss_type": "sigmoid", "nll_weight": 0.8}),
    "orpo": (Orpo, {"name": "orpo"}),
    "simpo": (Simpo, {"name": "simpo", "gamma": GAMMA}),
    "reward": (Reward, {"name": "reward", "center_weight": 0.02}),
}
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust")


def run_with(**keys: Any) -> Any:
    return SimpleNamespace(objective=ObjectiveConfig(beta=BETA, **keys))


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of a policy and a reference, and a mask [rows, 5]."""
    generator = torch.Generator().manual_seed(7)
    lp = -3 * torch.rand((ROWS, 5), generator=generator, dtype=dtype) - 0.01
    ref = -3 * torch.rand((ROWS, 5), generator=generator, dtype=dtype)
    mask = torch.rand((ROWS, 5), generator=generator) > 0.4
    mask[:, 2] = True
    return lp.requires_grad_(), ref, mask


def same(found: Tensor, wanted: Tensor, lp: Tensor, exact: Tensor, atol: float = 1e-6) -> None:
    """Compare losses, and the gradients of their sums in `lp` and in `exact`."""
    (gradient,) = torch.autograd.grad(found.sum(), lp)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    assert torch.allclose(found.double(), wanted.double(), rtol=1e-6, atol=atol)
    assert torch.allclose(gradient.double(), slope.double(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_pair_losses_equal_their_formulas(name: str, dtype: torch.dtype) -> None:
    kind, keys = CASES[name]
    smoothing = SMOOTHING if name in SMOOTHED else 0.0
    lp, ref, mask = drawn(dtype)
    refers = name not in ("orpo", "simpo", "reward")
    pairs = pairs_of(lp, mask.float(), ref if refers else None)
    found = kind(run_with(label_smoothing=smoothing, **keys)).compare(pairs).losses
    exact = lp.detach().double().requires_grad_()
    same(found, of_pairs(name, exact, ref.double(), mask, smoothing), lp, exact)


def kto_losses(lp: Tensor, ref: Tensor, mask: Tensor, good: Tensor) -> Tensor:
    run = run_with(name="kto", desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1])
    policy, other, _ = sums_of(lp, mask.float(), ref)
    return Kto(run).losses(policy - other, good, Z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pair_losses_kto_equals_its_formula(dtype: torch.dtype) -> None:
    """Compare with arXiv:2402.01306, equation 8, for any mix of labels."""
    lp, ref, mask = drawn(dtype)
    good = torch.rand(ROWS) > 0.7
    exact = lp.detach().double().requires_grad_()
    ratio = ((exact - ref.double()) * mask).sum(-1)
    wanted = torch.where(
        good,
        WEIGHTS[0] * (1 - sig(BETA * (ratio - Z))),
        WEIGHTS[1] * (1 - sig(BETA * (Z - ratio))),
    )
    same(kto_losses(lp, ref, mask, good), wanted, lp, exact)


def test_pair_losses_beta_reaches_every_gradient() -> None:
    """Change each gradient with beta, which other tools have lost on its way to the update."""
    lp, ref, mask = drawn(torch.float64)

    def slope(name: str, beta: float) -> Tensor:
        kind, keys = CASES.get(name, (Kto, {"name": "kto"}))
        objective = kind(SimpleNamespace(objective=ObjectiveConfig(beta=beta, **keys)))  # type: ignore[arg-type]
        if isinstance(objective, Kto):
            policy, other, _ = sums_of(lp, mask.float(), ref)
            losses = objective.losses(policy - other, torch.ones(ROWS) > 0, Z)
        else:
            losses = objective.compare(pairs_of(lp, mask.float(), ref)).losses
        return torch.autograd.grad(losses.sum(), lp)[0]

    for name in {*CASES, "kto"} - {"reward"}:
        assert not torch.allclose(slope(name, BETA), slope(name, 2 * BETA), rtol=0.1), name


class Outputs(SimpleNamespace):
    """The outputs of a model that TRL's trainers read; the logits only fill metrics."""

    def __init__(self, log_probs: Tensor) -> None:
        nothing = torch.zeros(log_probs.shape)
        super().__init__(
            log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0
        )


def trainer_of(**keys: Any) -> Any:
    """Return what `_compute_loss` of TRL's trainers reads of `self`."""
    alone = {name: lambda value: value for name in ("gather", "gather_for_metrics")}
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device=torch.device("cpu"), **alone),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        beta=BETA,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **keys,
    )


def inputs_of(mask: Tensor) -> dict[str, Tensor]:
    """Return a batch whose first token has no label."""
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    return {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}


def sides(value: Tensor) -> Tensor:
    """Return rows in TRL's order: all chosen answers, then all rejected ones."""
    return torch.cat([value[::2], value[1::2]])


LISTED = {"name": "dpo", "loss_type": ["sigmoid", "ipo", "hinge"], "loss_weights": [0.5, 2.0, 0.2]}
CASES["listed"] = (Dpo, LISTED)
TRL_CASES = (*(name for name in CASES if name not in ("rpo", "orpo", "simpo", "reward")),)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", TRL_CASES)
def test_pair_losses_dpo_equals_trl(name: str, dtype: torch.dtype) -> None:
    trl = pytest.importorskip("trl", reason="pip install 'mtrain[dev]'")
    kind, keys = CASES[name]
    smoothing = SMOOTHING if name == "robust" else 0.0
    lp, ref, mask = drawn(dtype)
    objective = kind(run_with(label_smoothing=smoothing, **keys))
    found = objective.compare(pairs_of(lp, mask.float(), ref)).losses
    exact = lp.detach().double().requires_grad_()
    trainer = trainer_of(
        loss_types=keys.get("loss_type", [name]) if name == "listed" else [name],
        loss_weights=keys.get("loss_weights", [1.0]),
        label_smoothing=smoothing,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    before = (ref.double() * mask).sum(-1)
    inputs = inputs_of(sides(mask))
    inputs |= {"ref_chosen_logps": before[::2], "ref_rejected_logps": before[1::2]}
    outputs = Outputs(sides(exact * mask))
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    same(found.sum()[None], len(found) * loss[None], lp, exact)
    metrics = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    compared = objective.compare(pairs_of(lp, mask.float(), ref))
    margin = (compared.rewards_chosen - compared.rewards_rejected).mean()
    assert metrics["rewards/margins"] == pytest.approx(float(margin.detach()), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share", [0.3, 1.0, 0.0])
def test_pair_losses_kto_equals_trl(share: float, dtype: torch.dtype) -> None:
    """Compare with TRL for a mix of labels, and for labels of one kind."""
    trl = pytest.importorskip("trl", reason="pip install 'mtrain[dev]'")
    lp, ref, mask = drawn(dtype)
    good = torch.rand(ROWS) < share
    exact = lp.detach().double().requires_grad_()
    trainer = trainer_of(
        loss_type="kto",
        desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1],
        calculate_KL=True,
        _compute_kl_logps=lambda model, batch: torch.full((ROWS,), Z, dtype=torch.float64),
    )
    inputs = inputs_of(mask)
    known = {"label": good, "ref_logps": (ref.double() * mask).sum(-1)}
    inputs |= {**known, "ref_KL_logps": torch.zeros(ROWS)}
    outputs = Outputs(exact * mask)
    loss = trl.KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    same(kto_losses(lp, ref, mask, good).sum()[None], ROWS * loss[None], lp, exact)


@pytest.mark.full
@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_pair_losses_without_reference_equal_trl(name: str) -> None:
    """Compare the odds ratio of orpo, which TRL computes in fp32, and simpo."""
    pytest.importorskip("trl", reason="pip install 'mtrain[dev]'")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    kind, keys = CASES[name]
    lp, _, mask = drawn(torch.float64)
    pairs = pairs_of(lp, mask.float(), None)
    found = kind(run_with(**keys)).compare(pairs).losses
    exact = lp.detach().requires_grad_()
    means = (exact * mask).sum(-1) / mask.sum(-1)
    keys = {"alpha": 0.0, "loss_type": "simpo", "simpo_gamma": GAMMA, "label_smoothing": 0.0}
    trainer = trainer_of(**keys)
    if name == "simpo":
        wanted = CPOTrainer.cpo_loss(trainer, means[::2], means[1::2])[0]
        same(found, wanted, lp, exact)
        return
    wanted = -ORPOTrainer.odds_ratio_loss(trainer, means[::2], means[1::2])[0]
    same(found, wanted - means[::2], lp, exact, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pair_losses_reward_margins_equal_trl(dtype: torch.dtype) -> None:
    """Compare with `compute_loss` of TRL 1.16's RewardTrainer, restated, with margins and
    centring.
    """
    lp, _, mask = drawn(dtype)
    margin = torch.rand(ROWS // 2, dtype=torch.float64) * 4 - 1
    pairs = pairs_of(lp, mask.float(), None)._replace(margin=margin)
    found = Reward(run_with(name="reward", center_weight=0.02)).compare(pairs).losses
    exact = lp.detach().double().requires_grad_()
    policy = (exact * mask).sum(-1)
    right = policy[::2] - policy[1::2] - margin
    wanted = -torch.log(sig(right)) + 0.02 * (policy[::2] + policy[1::2]) ** 2
    same(found, wanted, lp, exact)
    assert not torch.allclose(found.double(), of_pairs("reward", exact, exact, mask, 0.0))


def test_pair_losses_of_equal_models_is_log_two() -> None:
    lp = -torch.rand((6, 4))
    objective = Dpo(run_with(name="dpo", loss_type="sigmoid"))
    pairs = pairs_of(lp, torch.ones(6, 4), lp)
    assert objective.compare(pairs).losses.tolist() == pytest.approx([math.log(2)] * 3)
