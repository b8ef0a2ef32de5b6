"""The credit of sampled tokens: advantages, and what a critic learns from, of a global batch.

Every rank has all answers and their rewards. Numbers that models compute for the tokens of
data-parallel, context-parallel and pipeline ranks are brought together first, so advantages are a
pure function of the global batch, and no layout changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.train.critic import whitened
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import Batch
from mtrain.train.loop.step import log_probabilities
from mtrain.train.policy import PolicyObjective
from mtrain.train.rollouts.engine import Rollout


@dataclass(frozen=True)
class Credit:
    """Numbers of the labels of a global batch, [answers, tokens] each."""

    advantages: np.ndarray
    returns: np.ndarray | None = None
    values: np.ndarray | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the record of the step."""


@dataclass(frozen=True)
class Scores:
    """Numbers that models gave the labels of a global batch, fp64 [answers, tokens] each on the
    host, 0 where no token was sampled.
    """

    weights: Tensor
    """1 at sampled tokens."""
    divergence: Tensor
    """log(policy / reference); 0 without a reference in the reward."""
    values: Tensor
    """Values of the critic; 0 without one."""


def scores_of(
    context: TrainContext,
    rollouts: Sequence[Rollout],
    batches: Sequence[Batch],
    places: np.ndarray,
) -> Scores:
    """Return what the models of a run say of all answers of a global batch, before its update.

    Args:
        context: the run.
        rollouts: all answers.
        batches: the micro-batches of this rank.
        places: the answers of each of them, int64 [micro-batches, rows].
    """
    o = context.run.objective
    length = context.run.data.length
    weights = torch.zeros((len(rollouts), length), dtype=torch.float64)
    for row, one in enumerate(rollouts):
        first = len(one.prompt.ids) - 1
        # Nothing is learned from the turns of tools and users.
        own = torch.tensor(one.own, dtype=weights.dtype) if one.own else 1.0
        weights[row, first : first + len(one.ids)] = own

    def whole(found: Sequence[Tensor]) -> Tensor:
        every = brought_together(context, found, batches, places, weights.shape)
        return torch.where(weights > 0, every, 0.0)

    divergence = torch.zeros_like(weights)
    if o.kl_in_reward:
        policy, reference = (
            whole(log_probabilities(context, batches, kind)) for kind in ("none", o.reference)
        )
        divergence = policy - reference
    values = torch.zeros_like(weights)
    if context.critic is not None:
        values = whole(context.critic.values(batches))
    return Scores(weights, divergence, values)


def brought_together(
    context: TrainContext,
    found: Sequence[Tensor],
    batches: Sequence[Batch],
    places: np.ndarray,
    shape: Sequence[int],
) -> Tensor:
    """Return numbers of the labels [b, s] of every rank's micro-batches as one tensor of `shape`
    [answers, tokens], fp64 on the host of each rank; `found` is empty on stages without the loss.
    """
    world = context.world
    every = torch.zeros(tuple(shape), dtype=torch.float32, device=world.torch_device)
    # Tensor-parallel ranks have the same numbers: one of them hands them over.
    if world.coords["tp"] == 0:
        for rows, batch, numbers in zip(places, batches, found, strict=False):
            row = torch.from_numpy(rows).to(every.device)[:, None]
            every[row, batch["position_ids"]] = numbers.detach().float()
    dist.all_reduce(every)
    return every.cpu().double()


def credit_of(objective: PolicyObjective, rewards: np.ndarray, scores: Scores) -> Credit:
    """Return the credit of the answers of a global batch from their rewards, float64 [groups,
    answers]: a pure function, so every rank has the same.
    """
    o = objective.run.objective
    weights = scores.weights
    taken_off = o.kl_in_reward * scores.divergence
    measured = {}
    if o.kl_in_reward:
        measured["rollout_kl"] = float(scores.divergence.sum() / weights.sum())
    if not objective.per_token:
        judged = rewards - taken_off.sum(1).reshape(rewards.shape).numpy()
        each = objective.advantages(judged).ravel()
        return Credit(np.broadcast_to(each[:, None], weights.shape), measured=measured)
    received = -taken_off
    # The last token that the policy sampled; a turn of a tool may stand behind it.
    last = weights.shape[1] - 1 - weights.flip(1).argmax(1)
    received[torch.arange(len(last)), last] += torch.from_numpy(rewards.ravel())
    found = objective.estimates(received, scores.values, weights)
    advantages = whitened(found.advantages, weights).numpy()
    if not o.criticises:
        return Credit(advantages, measured=measured)
    measured |= _explained(scores.values, found.returns, weights)
    return Credit(advantages, found.returns.numpy(), scores.values.numpy(), measured)


def _explained(values: Tensor, returns: Tensor, weights: Tensor) -> dict[str, float]:
    """Return means of values and returns of sampled tokens, and the share of the returns' variance
    that the values explain.
    """
    held = weights > 0
    target = returns[held]
    spread = float(target.var())
    left = float((target - values[held]).var())
    return {
        "value_mean": float(values[held].mean()),
        "return_mean": float(target.mean()),
        "explained_variance": 1 - left / spread if spread else 0.0,
    }
