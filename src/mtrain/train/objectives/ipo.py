"""Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, equation 17)."""

from __future__ import annotations

from mtrain.train.objectives.dpo import dpo_losses
from mtrain.train.pairs import Compared, PairObjective, Pairs


class Ipo(PairObjective):
    """The square of the margin's distance from 1 / (2 beta), of means over tokens as in TRL."""

    def compare(self, pairs: Pairs) -> Compared:
        """Return the loss of each pair, and beta times the log-ratios as rewards."""
        beta = self.run.objective.beta
        assert beta is not None
        losses = dpo_losses(pairs, "ipo", beta, 0.0)
        return Compared(losses, beta * pairs.chosen_ratio, beta * pairs.rejected_ratio)


OBJECTIVE = Ipo
