"""Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, equations 4 to 7)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mtrain.train.pairs import Compared, PairObjective, Pairs, mean


class Orpo(PairObjective):
    """The mean negative log-probability of chosen tokens, and the log-odds of both answers.

    Each pair weighs the same. TRL's ORPOTrainer divides the first term by the tokens of its batch.
    """

    def compare(self, pairs: Pairs) -> Compared:
        """Return the loss of each pair, and beta times the mean log-probabilities as rewards."""
        beta = self.run.objective.beta
        assert beta is not None
        chosen = mean(pairs.chosen, pairs.chosen_tokens)
        rejected = mean(pairs.rejected, pairs.rejected_tokens)
        losses = -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))
        return Compared(losses, beta * chosen, beta * rejected)


def log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p < 0."""
    # A pair that only fills a step has p = 1: keep its gradient finite.
    below = log_probability.clamp(max=-1e-12)
    return below - torch.log(-torch.expm1(below))


OBJECTIVE = Orpo
