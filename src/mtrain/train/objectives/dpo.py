"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from mtrain.train.pairs import Compared, PairObjective, Pairs, mean


class Dpo(PairObjective):
    """A function of the log-ratios of both answers to a reference; `objective.loss_type` has the
    sources.
    """

    def compare(self, pairs: Pairs) -> Compared:
        """Return the loss of each pair, and beta times the log-ratios as rewards."""
        o = self.run.objective
        assert o.beta is not None
        losses = -o.nll_weight * mean(pairs.chosen, pairs.chosen_tokens)
        for kind, weight in o.weighted_losses:
            losses = losses + weight * dpo_losses(pairs, kind, o.beta, o.label_smoothing)
        return Compared(losses, o.beta * pairs.chosen_ratio, o.beta * pairs.rejected_ratio)


def dpo_losses(pairs: Pairs, kind: str, beta: float, smoothing: float) -> Tensor:
    """Return the loss of each pair by one `objective.loss_type`, with a share `smoothing` of labels
    the other way round.
    """
    chosen = pairs.chosen_ratio
    rejected = pairs.rejected_ratio
    if kind in ("ipo", "sigmoid_norm"):
        chosen = mean(chosen, pairs.chosen_tokens)
        rejected = mean(rejected, pairs.rejected_tokens)
    margin = chosen - rejected
    if kind == "hinge":
        return (1 - beta * margin).relu()
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if kind == "apo_zero":
        return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()
    if kind == "apo_down":
        return (beta * chosen).sigmoid() + (-beta * margin).sigmoid()
    right = -logsigmoid(beta * margin)
    wrong = -logsigmoid(-beta * margin)
    if kind == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


OBJECTIVE = Dpo
