"""Numbers that the models of a run give the tokens of all answers: values, and the divergence from
the reference.

Every rank has all answers and their rewards. Numbers that models compute for the tokens of
data-parallel, context-parallel and pipeline ranks are brought together, so that advantages are a
pure function of the global batch (`mtrain.train.rollouts.credit`), and no layout changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import Batch
from mtrain.train.loop.step import log_probabilities
from mtrain.train.rollouts.credit import Scores
from mtrain.train.rollouts.engine import Rollout


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
