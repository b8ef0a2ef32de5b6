"""Probabilities of texts under a model in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mtrain.mcore import api as mcore
from mtrain.train.generate.sampler import Sampler, evaluated
from mtrain.world.heartbeat import begin_phase


@dataclass(frozen=True)
class Scored:
    """The tokens of a sequence after the first."""

    log_probabilities: list[float]
    """Nats, each after all tokens before it."""
    likeliest: list[bool]
    """True where no other token was more likely."""


@torch.no_grad()
def score(sampler: Sampler, sequences: Sequence[list[int]], rows: int = 8) -> list[Scored]:
    """Return the log probabilities of each sequence's tokens, in the order given and the same on
    every rank.

    A sequence has two tokens or more, at most `sampler.context` + 1; those of similar length are
    computed together.
    """
    # longest first: the first group shows whether memory suffices
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    rows = rows if sampler.independent else 1
    out: dict[int, Scored] = {}
    with evaluated(sampler.chunks):
        for first in range(0, len(order), rows):
            begin_phase("evaluation")
            group = order[first : first + rows]
            scored = _scored(sampler, [sequences[i] for i in group])
            for i, (values, likeliest) in zip(group, scored.unbind(1), strict=True):
                count = len(sequences[i]) - 1
                out[i] = Scored(values[:count].tolist(), (likeliest[:count] > 0).tolist())
    return [out[i] for i in range(len(sequences))]


def _scored(sampler: Sampler, sequences: list[list[int]]) -> torch.Tensor:
    """Return log probabilities, and ones for the likeliest tokens: float64 [2, rows, length]."""
    longest = len(sequences[0]) - 1
    length = -(-longest // sampler.multiple) * sampler.multiple
    device = sampler.world.torch_device
    padded = torch.zeros((len(sequences), length + 1), dtype=torch.int64)
    for row, ids in enumerate(sequences):
        padded[row, : len(ids)] = torch.tensor(ids)
    padded = padded.to(device)
    # Padding may exceed the learned positions; its logits are not read.
    positions = torch.arange(length, device=device).clamp(max=sampler.context - 1)
    labels = padded[:, 1:, None]
    vocabulary = sampler.run.model.vocab_size

    def take(logits: torch.Tensor) -> torch.Tensor:
        whole = mcore.gather_from_tensor_model_parallel_region(logits)[..., :vocabulary].float()
        chosen = whole.gather(-1, labels).squeeze(-1)
        return torch.stack([chosen - whole.logsumexp(-1), (chosen == whole.amax(-1)).float()])

    lengths = [len(ids) - 1 for ids in sequences]
    values = sampler.forward(padded[:, :-1].contiguous(), positions, take, {}, lengths)
    summed = torch.zeros((2, len(sequences), length), dtype=torch.float64, device=device)
    if values is not None and sampler.world.rank == sampler.grid.rank_of(pp=sampler.grid.pp - 1):
        # Ranks of the last stage have the same values: only the first adds them.
        summed += values.double()
    dist.all_reduce(summed)
    return summed.cpu()
