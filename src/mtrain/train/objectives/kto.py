"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.train.objectives import Batch, Metric, Objective
from mtrain.train.objectives.next_token import COUNT, LOSS, TOKENS
from mtrain.train.pairs import BASELINE, KL, REFERENCE, sums_of

METRICS = (
    LOSS,
    COUNT,
    TOKENS,
    Metric("chosen_answers"),
    Metric("rejected_answers"),
    Metric("chosen_share", reduce="count"),
    Metric("rewards_chosen", reduce="chosen_answers"),
    Metric("rewards_rejected", reduce="rejected_answers"),
    Metric("reward_accuracy", reduce="count"),
    Metric("chosen_tokens", reduce="chosen_answers"),
    Metric("rejected_tokens", reduce="rejected_answers"),
    Metric("mismatched_kl", reduce="count"),
)


class Kto(Objective):
    """The mean over answers of 1 minus their value, measured from a divergence z.

    An answer is desirable or not by itself: the chosen and the rejected one of a pair, or one with
    a label. z is the mean over the global batch of log(policy / reference) of answers to other
    prompts, at least 0, and has no gradient.
    """

    reads_log_probabilities = True

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, counts, z, the numbers of each kind of answers, and the KL to a reference if
        there is one.
        """
        return (*METRICS, KL) if self.run.objective.refers else METRICS

    def losses(self, ratios: Tensor, desirable: Tensor, divergence: Tensor | float) -> Tensor:
        """Return the loss of each answer from log(policy / reference), a pure function."""
        o = self.run.objective
        assert o.beta is not None
        value = o.beta * (ratios - divergence)
        good = o.desirable_weight * (-value).sigmoid()
        bad = o.undesirable_weight * value.sigmoid()
        return torch.where(desirable, good, bad)

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum over the answers of a micro-batch; `output` holds the log-probability of
        each label [b, s].
        """
        # Here: the losses themselves need no megatron-core.
        from mtrain.mcore import api as mcore

        group = mcore.parallel_state.get_context_parallel_group()
        mask = batch["loss_mask"]
        # A missing reference is an error, and not a uniform model.
        reference = batch[REFERENCE] if self.run.objective.refers else None
        policy, other, tokens = sums_of(output, mask, reference, group)
        desirable = sums_of(batch["desirable"], mask, None, group)[0] > 0
        divergence = batch[BASELINE]
        losses = self.losses(policy - other, desirable, divergence)
        counted = (tokens > 0).double()
        total = (losses * counted).sum()
        # Context-parallel ranks have the same sums: one of them counts, and each has the gradient
        # of its own tokens.
        counted = counted * (group.rank() == 0)
        ratios = (policy - other).detach()
        # Each number of an answer, before it is added up.
        beta = self.run.objective.beta
        assert beta is not None
        rewards = beta * ratios
        chosen = desirable.double()
        above = (ratios > divergence) == desirable
        # A policy that is its reference tells nothing: half of the answers count as right.
        right = torch.where(ratios == divergence, 0.5, above.double())
        values = {
            "loss": losses.detach(),
            "count": torch.ones_like(tokens),
            "tokens": tokens,
            "chosen_answers": chosen,
            "rejected_answers": 1 - chosen,
            "chosen_share": chosen,
            "rewards_chosen": chosen * rewards,
            "rewards_rejected": (1 - chosen) * rewards,
            "reward_accuracy": right,
            "chosen_tokens": chosen * tokens,
            "rejected_tokens": (1 - chosen) * tokens,
            "mismatched_kl": torch.ones_like(tokens) * divergence,
            "reference_kl": ratios,
        }
        metrics = [one.of((values[one.name] * counted).sum()) for one in self.metrics()]
        return total.float(), counted.sum(), metrics


OBJECTIVE = Kto
