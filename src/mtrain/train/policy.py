"""Losses of sampled answers, from log-probabilities of tokens: the common part of their objectives.

Advantages are a function of the rewards of the whole global batch. A loss is a function
of the tokens of a micro-batch, and is a weighted sum: only the trainer divides, by the count of
`ObjectiveConfig.divisor` over the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.train.critic import Estimates
from mtrain.train.objectives import MAX, Batch, Metric, Objective
from mtrain.train.objectives.next_token import COUNT, LOSS, TOKENS
from mtrain.train.pairs import REFERENCE

ADVANTAGES = "advantages"
SAMPLED = "sampled_log_probabilities"
OLD = "old_log_probabilities"
"""Key of a micro-batch: the trainer's log-probability of each label when it was sampled [b, s];
without it, that of now.
"""
SMALL = 1e-4
"""Addend of a standard deviation that divides, as in TRL."""
BAND = 0.2
"""Largest ratio of the trainer's to the sampler's probability, less 1, that is inside the band."""
METRICS = (
    LOSS,
    COUNT,
    TOKENS,
    Metric("clip_share", reduce="tokens"),
    Metric("sampler_gap", reduce="tokens"),
    Metric("sampler_gap_max", reduce=MAX),
    Metric("gen_kl_error", reduce="tokens"),
    Metric("sampler_outside_band", reduce="tokens"),
)
KL = Metric("reference_kl", reduce="tokens")
IMPORTANCE = Metric("importance", reduce="tokens")


class Tokens(NamedTuple):
    """The sampled tokens of a micro-batch, [b, s] each; where `weights` is 0, nothing is read."""

    current: Tensor
    """The policy's log-probabilities, with a gradient."""
    old: Tensor
    """The same of the policy that sampled."""
    advantages: Tensor
    weights: Tensor
    """The weight of each token in the sum."""


class Judged(NamedTuple):
    """The losses of tokens, and which were clipped; [b, s] each."""

    losses: Tensor
    clipped: Tensor


class PolicyObjective(Objective):
    """A loss of answers that the policy sampled."""

    reads_log_probabilities = True
    per_token = False
    """True if each token has an advantage of its own, by `estimates` instead of `advantages`."""

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return the advantage of each answer of a global batch, float64 [groups, answers], from
        their rewards in the same shape: a pure function, so every rank has the same.
        """
        raise NotImplementedError

    def estimates(self, rewards: Tensor, values: Tensor, weights: Tensor) -> Estimates:
        """Return the advantage and the return of each token of a global batch, not whitened; all
        are [answers, tokens], as in `generalized_advantages`.
        """
        raise NotImplementedError

    def judge(self, tokens: Tokens, group: dist.ProcessGroup | None) -> Judged:
        """Return the loss of each token; `group` has the other tokens of these answers."""
        raise NotImplementedError

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, counts, and how far policy and sampler differ; the KL to a reference if
        there is one.
        """
        o = self.run.objective
        corrected = (IMPORTANCE,) if o.importance != "none" else ()
        return (*METRICS, *((KL,) if o.loss_refers else ()), *corrected)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the weighted sum of a micro-batch; `output` holds the log-probability of each
        label [b, s].
        """
        # Here: the losses themselves need no megatron-core.
        from mtrain.mcore import api as mcore

        o = self.run.objective
        weights = batch["loss_mask"]
        # With one update for each batch of rollouts, the policy that sampled is this one: the ratio
        # is exactly 1, whatever rounding makes of the sampler's log-probabilities.
        old = batch.get(OLD, output.detach())
        tokens = Tokens(output, old, batch[ADVANTAGES], weights)
        group = mcore.parallel_state.get_context_parallel_group()
        judged = self.judge(tokens, group)
        losses = judged.losses
        divergence = torch.zeros_like(output)
        if o.loss_refers:
            divergence = divergence_of(output, batch[REFERENCE], o.kl_estimator)
            losses = losses + o.kl_coef * divergence
        importance = torch.ones_like(losses)
        if o.importance != "none":
            gap = tokens.old - batch[SAMPLED]
            importance = importance_of(gap, weights, o.importance, o.importance_cap, group)
            losses = losses * importance
        # In fp64: thousands of fp32 terms of both signs would leave an error.
        total = (losses.double() * weights).sum()
        count = batch.get("loss_counts", weights).sum()
        beside = {"reference_kl": divergence, "importance": importance}
        reported = self._reported(tokens, batch[SAMPLED], judged.clipped, beside)
        values = {"loss": total.detach(), "count": count, **reported}
        return total.float(), count, [one.of(values[one.name]) for one in self.metrics()]

    @torch.no_grad()
    def _reported(
        self, tokens: Tokens, sampled: Tensor, clipped: Tensor, beside: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        counted = (tokens.weights > 0).double()
        # Padding has labels too, which nobody sampled.
        gap = torch.where(tokens.weights > 0, tokens.old.double() - sampled.double(), 0.0)
        ratio = gap.exp()
        moved = torch.where(tokens.weights > 0, tokens.old.double() - tokens.current.double(), 0.0)
        values = {
            "tokens": torch.ones_like(gap),
            "clip_share": clipped.double(),
            "approximate_kl": moved,
            "sampler_gap": gap.abs(),
            "gen_kl_error": ratio - 1 - gap,
            "sampler_outside_band": ((ratio - 1).abs() > BAND).double(),
            **{name: value.double() for name, value in beside.items()},
        }
        sums = {name: (value * counted).sum() for name, value in values.items()}
        return {**sums, "sampler_gap_max": gap.abs().max()}


def divergence_of(current: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Return the estimated KL divergence from the reference at each token, as
    `objective.kl_estimator` says.
    """
    x = reference - current
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    return torch.expm1(x) - x


def clipped_losses(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Judged:
    """Return PPO's clipped loss (arXiv:1707.06347, equation 7) of ratios, and where the clip
    decides.
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    return Judged(losses, clipped)


@torch.no_grad()
def importance_of(
    gap: Tensor, weights: Tensor, kind: str, cap: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the weight of each token by `objective.importance`, from the trainer's
    log-probabilities less the sampler's [b, s].
    """
    if kind == "sequence_masked":
        gap = summed_over_answers(gap, weights, group)[0].to(gap.dtype).expand_as(gap)
    ratio = gap.exp()
    if kind == "truncated":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)


def summed_over_answers(
    values: Tensor, weights: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the sum over the sampled tokens of each answer, and their number; fp64 [b, 1] each,
    without a gradient, the same on all ranks of `group`.
    """
    counted = (weights > 0).double()
    sums = torch.stack([(values.detach().double() * counted).sum(-1), counted.sum(-1)])
    # Context-parallel ranks have parts of an answer, whose ratio is one number.
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, tokens = sums[..., None]
    return total, tokens.clamp(min=1)
