"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8)."""

from __future__ import annotations

from mtrain.train.objectives import Metric
from mtrain.train.pairs import Compared, PairObjective, Pairs

DIVERGENCE = Metric("mismatched_kl", reduce="count")


class Kto(PairObjective):
    """The mean over answers of 1 minus their value, measured from a divergence z.

    z is the mean over the global batch of log(policy / reference) of answers to other prompts, at
    least 0, and has no gradient.
    """

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of all pairs, and z."""
        return (*super().metrics(), DIVERGENCE)

    def compare(self, pairs: Pairs) -> Compared:
        """Return the loss of each pair, the mean of its two answers, and beta times the log-ratios
        as rewards.
        """
        o = self.run.objective
        assert o.beta is not None
        chosen = o.beta * pairs.chosen_ratio
        rejected = o.beta * pairs.rejected_ratio
        z = o.beta * pairs.baseline
        desirable = o.desirable_weight * (z - chosen).sigmoid()
        undesirable = o.undesirable_weight * (rejected - z).sigmoid()
        return Compared((desirable + undesirable) / 2, chosen, rejected)


OBJECTIVE = Kto
