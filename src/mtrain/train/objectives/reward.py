"""A model of rewards by Bradley and Terry (Ouyang et al. 2022, arXiv:2203.02155, equation 1), with
the margins of data that has them (Touvron et al. 2023, arXiv:2307.09288, equation 2).
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from mtrain.train.objectives import Metric
from mtrain.train.pairs import METRICS, Compared, PairObjective, Pairs

LENGTHS = ("chosen_tokens", "rejected_tokens")


class Reward(PairObjective):
    """The negative log-probability that the chosen answer wins, from the numbers that a value head
    gives the last tokens of both answers, where transformers reads them.
    """

    reads_log_probabilities = False

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, counts and rewards; `tokens` are those that are read, one for an answer."""
        return tuple(one for one in METRICS if one.name not in LENGTHS)

    def compare(self, pairs: Pairs) -> Compared:
        """Return the loss of each pair, and its rewards."""
        losses = -logsigmoid(pairs.chosen - pairs.rejected - pairs.margin)
        centred = (pairs.chosen + pairs.rejected).square()
        losses = losses + self.run.objective.center_weight * centred
        return Compared(losses, pairs.chosen, pairs.rejected)


OBJECTIVE = Reward
