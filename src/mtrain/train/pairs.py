"""Losses of pairs of answers, from log-probabilities of tokens: the common part of dpo, ipo, orpo
and simpo.

The rows of a micro-batch are the chosen and the rejected answer of one pair after the other. A loss
is a function of sums over the tokens of each answer, and is itself a sum over pairs: only the
trainer divides, by the pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.data.batch import OTHER
from mtrain.train.objectives import Batch, Metric, Objective
from mtrain.train.objectives.next_token import COUNT, LOSS, TOKENS

REFERENCE = "reference_log_probabilities"
"""Key of a micro-batch: the reference's log-probability of each label [b, s], in fp32."""
MARGINS = "margins"
"""Key of a micro-batch: the margin of each pair at the first label of its chosen answer, fp64
[b, s].
"""
BASELINE = "mismatched_divergence"
"""Key of a micro-batch: the mean log-ratio of answers to other prompts in the global batch, at
least 0, fp64 [].
"""
ADDED = {REFERENCE, BASELINE}
METRICS = (
    LOSS,
    COUNT,
    TOKENS,
    Metric("rewards_chosen", reduce="count"),
    Metric("rewards_rejected", reduce="count"),
    Metric("reward_margin", reduce="count"),
    Metric("reward_accuracy", reduce="count"),
    Metric("chosen_tokens", reduce="count"),
    Metric("rejected_tokens", reduce="count"),
)
KL = Metric("reference_kl", reduce="tokens")


class Pairs(NamedTuple):
    """The pairs of a micro-batch: sums over the tokens of an answer, fp64 [pairs] each."""

    chosen: Tensor
    """Log-probability of the chosen answer."""
    rejected: Tensor
    chosen_reference: Tensor
    """The same by the reference; 0 without one."""
    rejected_reference: Tensor
    chosen_tokens: Tensor
    """Tokens that are learned; 0 in a pair that only fills a step."""
    rejected_tokens: Tensor
    margin: Tensor | float = 0.0
    """The margins of the data by which chosen answers are better."""

    @property
    def chosen_ratio(self) -> Tensor:
        """Return log(policy / reference) of each chosen answer."""
        return self.chosen - self.chosen_reference

    @property
    def rejected_ratio(self) -> Tensor:
        """Return log(policy / reference) of each rejected answer."""
        return self.rejected - self.rejected_reference


class Compared(NamedTuple):
    """The losses of pairs and the rewards that they compare, [pairs] each."""

    losses: Tensor
    rewards_chosen: Tensor
    rewards_rejected: Tensor


class PairObjective(Objective):
    """A loss of pairs of answers."""

    reads_log_probabilities = True

    def compare(self, pairs: Pairs) -> Compared:
        """Return loss and rewards of each pair, a pure function of the sums of its answers."""
        raise NotImplementedError

    def metrics(self) -> tuple[Metric, ...]:
        """Return loss, counts, rewards and lengths, and the KL to a reference if there is one."""
        return (*METRICS, KL) if self.run.objective.refers else METRICS

    def loss(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """Return the sum over the pairs of a micro-batch; `output` holds the log-probability of
        each label [b, s].
        """
        # Here: the losses of pairs themselves need no megatron-core.
        from mtrain.mcore import api as mcore

        group = mcore.parallel_state.get_context_parallel_group()
        # A missing reference is an error, and not a uniform model.
        reference = batch[REFERENCE] if self.run.objective.refers else None
        pairs = pairs_of(output, batch["loss_mask"], reference, group, packed_answers(batch))
        if MARGINS in batch:
            margins, _, _ = sums_of(batch[MARGINS], batch["loss_mask"], None, group)
            pairs = pairs._replace(margin=margins[::2])
        compared = self.compare(pairs)
        counted = (pairs.chosen_tokens > 0).double()
        total = (compared.losses * counted).sum()
        # Context-parallel ranks have the same sums: one of them counts, and each has the gradient
        # of its own tokens.
        counted = counted * (group.rank() == 0)
        return total.float(), counted.sum(), self._reported(pairs, compared, counted)

    @torch.no_grad()
    def _reported(self, pairs: Pairs, compared: Compared, counted: Tensor) -> list[Metric]:
        losses, chosen, rejected = compared
        # Equal rewards tell nothing: half of such pairs count as right.
        right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
        ratios = pairs.chosen_ratio + pairs.rejected_ratio
        values = {
            "loss": losses,
            "count": torch.ones_like(losses),
            "tokens": pairs.chosen_tokens + pairs.rejected_tokens,
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": right,
            "chosen_tokens": pairs.chosen_tokens,
            "rejected_tokens": pairs.rejected_tokens,
            "reference_kl": ratios,
        }
        return [one.of((values[one.name] * counted).sum()) for one in self.metrics()]


def pairs_of(
    log_probabilities: Tensor,
    weights: Tensor,
    reference: Tensor | None,
    group: dist.ProcessGroup | None = None,
    packed: tuple[Tensor, int] | None = None,
) -> Pairs:
    """Return the sums of the answers of a micro-batch.

    Args:
        log_probabilities: of each label, [2 pairs, s]; this rank's part of the tokens.
        weights: 1 where a label is learned, else 0.
        reference: log-probabilities of the reference.
        group: the ranks that have the other tokens of these answers.
        packed: `packed_answers` of [1, s] labels.
    """
    policy, other, tokens = sums_of(log_probabilities, weights, reference, group, packed)
    return Pairs(policy[::2], policy[1::2], other[::2], other[1::2], tokens[::2], tokens[1::2])


def sums_of(
    log_probabilities: Tensor,
    weights: Tensor,
    reference: Tensor | None,
    group: dist.ProcessGroup | None = None,
    packed: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over the labels of each answer, fp64 [answers]: its log-probability, that of the
    reference (0 without one), and its tokens. See `pairs_of`.
    """
    # In fp64: thousands of fp32 terms would leave an error that is large next to a margin.
    weights = weights.double()
    terms = [log_probabilities.double() * weights, weights]
    if reference is not None:
        terms.append(reference.double() * weights)
    values = torch.stack(terms)
    if packed is None:
        sums = values.sum(-1)
    else:
        of, count = packed
        sums = values.new_zeros(len(terms), count).index_add(1, of.flatten(), values.flatten(1))
    policy, tokens, *rest = _OverRanks.apply(sums, group).unbind()
    other = rest[0] if rest else torch.zeros_like(policy)
    return policy, other.detach(), tokens.detach()


def packed_answers(batch: Batch) -> tuple[Tensor, int] | None:
    """Return the answer of each label of a packed micro-batch, int64 [1, s], and an even number
    that answers are below; None for rows of one answer each.
    """
    if "answers" not in batch:
        return None
    # A document each, and the padding of rows: the host knows no closer bound without a wait.
    documents = len(batch["cu_seqlens"]) - 1
    return batch["answers"], documents + documents % 2


def others_of(batch: Batch) -> Batch:
    """Return a micro-batch with the answers to other prompts in the place of its own; a stage
    between has neither.
    """
    found = {key.removeprefix(OTHER): value for key, value in batch.items() if OTHER in key}
    return {**batch, **found}


@torch.no_grad()
def mismatch_of(values: Tensor, weights: Tensor, reference: Tensor | None) -> Tensor:
    """Return the sum over answers of log(policy / reference), and their number; fp64 [2]."""
    from mtrain.mcore import api as mcore

    group = mcore.parallel_state.get_context_parallel_group()
    policy, other, tokens = sums_of(values, weights, reference, group)
    return torch.stack([(policy - other).sum(), (tokens > 0).sum()])


class _OverRanks(torch.autograd.Function):
    """The sum over ranks, each of which computes the same from it: a rank's gradient is that of its
    own addend.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is None or group.size() == 1:
            return value.clone()
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the whole loss: a sum of their gradients would count it once for each.
        return gradient, None


def mean(total: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean over the tokens of each answer; 0 for an answer without tokens."""
    return total / tokens.clamp(min=1)
