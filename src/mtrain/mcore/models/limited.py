"""Log-probabilities of tokens that were drawn among a few tokens, by the trainer.

A sampler that draws with top-k, top-p or min-p renormalises over the tokens that it keeps. So does
the trainer here, over the same tokens: it reads only their logits, and no sum over the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from mtrain_kernels.cross_entropy.reference import capped
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PART = 1 << 26
"""Numbers of gathered weights that exist at once."""


def limited_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    among: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    group: Any = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the log-probability [n] of each of `labels` [n] among the tokens `among` [n, k], fp32.

    `hidden` [n, h] is the input of the output layer, or this rank's [n / tp, h] under sequence
    parallelism; `weight` [v / tp, h] has this rank's part of the vocabulary. A label that is not
    among its tokens has minus infinity.
    """
    if group is not None and sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    elif group is not None:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    first = 0 if group is None else group.rank() * weight.shape[0]
    size = max(1, PART // (among.shape[1] * weight.shape[1]))
    parts = zip(hidden.split(size), (among - first).split(size), strict=True)
    found = [checkpoint(_logits, part, weight, ids, use_reentrant=False) for part, ids in parts]
    logits = torch.cat(found)
    if group is not None:
        # Each token's logit is on one rank; the others have 0.
        logits = reduce_from_tensor_model_parallel_region(logits, group=group)
    if soft_cap is not None:
        logits = capped(logits, soft_cap)
    logits = (logits / temperature).masked_fill(among < 0, -torch.inf)
    own = logits.masked_fill(among != labels[:, None], -torch.inf).amax(-1)
    return own - logits.logsumexp(-1)


def _logits(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return logits [t, k] of `ids` [t, k], places in `weight`; 0 where they are outside of it."""
    held = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[ids.clamp(0, weight.shape[0] - 1)].float()
    return (rows * hidden.float()[:, None]).sum(-1).masked_fill(~held, 0.0)
