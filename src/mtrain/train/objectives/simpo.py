"""Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734, equation 6)."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from mtrain.train.pairs import Compared, PairObjective, Pairs, mean


class Simpo(PairObjective):
    """Mean log-probabilities of tokens as rewards, which differ by a margin; no reference."""

    def compare(self, pairs: Pairs) -> Compared:
        """Return loss and rewards of each pair."""
        o = self.run.objective
        assert o.beta is not None
        assert o.gamma is not None
        chosen = o.beta * mean(pairs.chosen, pairs.chosen_tokens)
        rejected = o.beta * mean(pairs.rejected, pairs.rejected_tokens)
        return Compared(-logsigmoid(chosen - rejected - o.gamma), chosen, rejected)


OBJECTIVE = Simpo
