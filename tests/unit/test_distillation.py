"""Divergences from a teacher against their definitions, restated here in fp64 on random batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain.mcore.models.distillation import Divergence, Head, Lesson, distil, top_k

TOKENS = 6
VOCABULARY = 13
ROWS = 16
"""Rows of the output weights from 13 on only pad the vocabulary."""
CASES: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"beta": 1.0},
    "jsd": {"beta": 0.3, "temperature": 2.0},
    "jsd_ce": {"beta": 0.5, "temperature": 0.7, "ce_weight": 0.25},
    "forward_ce": {"beta": 0.0, "temperature": 3.0, "ce_weight": 0.6},
}


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Return TRL 1.16's `generalized_jsd_loss` (experimental.gkd) of each token [t]."""
    student_log_probs = F.log_softmax(student / temperature, dim=-1)
    teacher_log_probs = F.log_softmax(teacher / temperature, dim=-1)
    return divergence(student_log_probs, teacher_log_probs, beta)


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:  # KL(a || b)
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    log_m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def bucketed(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities [t, k + 1] of some tokens and of all others together."""
    p = F.softmax(logits / temperature, dim=-1)
    chosen = p.gather(1, ids)
    others = torch.ones_like(p).scatter(1, ids, 0.0)
    return torch.cat([chosen, (p * others).sum(-1, keepdim=True)], dim=1).log()


def wanted(
    student: Tensor, teacher: Tensor, labels: Tensor, keys: dict[str, Any], k: int | None
) -> Tensor:
    beta = keys.get("beta", 0.0)
    temperature = keys.get("temperature", 1.0)
    weight = keys.get("ce_weight", 0.0)
    if k is None:
        found = generalized_jsd(student, teacher, beta, temperature)
    else:
        ids = teacher.topk(k, dim=-1).indices
        found = divergence(
            bucketed(student, ids, temperature), bucketed(teacher, ids, temperature), beta
        )
    return (1 - weight) * found + weight * F.cross_entropy(student, labels, reduction="none")


@pytest.mark.parametrize("batches", [2, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("name", CASES)
def test_distillation_equals_its_definition(
    name: str, k: int | None, dtype: torch.dtype, batches: int
) -> None:
    """Compare values and gradients, of tokens with different weights, in two chunks."""
    keys = CASES[name]
    how = Divergence(**keys)
    generator = torch.Generator().manual_seed(5)
    for _ in range(batches):
        draw = {"generator": generator, "dtype": dtype}
        hidden = torch.randn(TOKENS, 8, **draw)
        weight = 0.5 * torch.randn(ROWS, 8, **draw)
        taught = torch.randn(TOKENS, 5, **draw)
        theirs = 0.5 * torch.randn(ROWS, 5, **draw)
        labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        factors = torch.rand(TOKENS, generator=generator)
        factors[1] = 0.0
        head = Head(theirs, scale=1.5, soft_cap=4.0)
        lesson = Lesson(how, taught[:, None], head, chunk=4)
        if k is not None:
            top = top_k(
                taught[:, None], head, k, vocab_size=VOCABULARY, temperature=how.temperature
            )
            lesson = Lesson(how, top=top, chunk=4)
        for each in (hidden, weight):
            each.requires_grad_()
        sums = distil(hidden, weight, labels, factors, lesson, vocab_size=VOCABULARY, soft_cap=3.0)
        found = torch.autograd.grad(sums[0], [hidden, weight])

        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        student = 3.0 * torch.tanh(exact[0] @ exact[1][:VOCABULARY].t() / 3.0)
        x = 1.5 * taught.double() @ theirs[:VOCABULARY].double().t()
        losses = wanted(student, 4.0 * torch.tanh(x / 4.0), labels, keys, k)
        total = (losses * factors).sum()
        slopes = torch.autograd.grad(total, exact)
        tolerance = {"rtol": 1e-6, "atol": 1e-6}
        assert torch.allclose(sums[0].double(), total, **tolerance)
        for gradient, slope in zip(found, slopes, strict=True):
            assert torch.allclose(gradient.double(), slope, **tolerance)
