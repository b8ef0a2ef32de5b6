"""Answers as numbers, for exchanges between ranks, and the seeds of their draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.train.generate.request import ENDINGS, Continuation, Sampling
from mtrain.train.rollouts.engine import Prompt


def packed(texts: Mapping[int, Continuation], count: int, longest: int) -> torch.Tensor:
    """Return texts of at most `longest` tokens by their number, as float64 [count, 2 + 2 longest];
    zeros for those of other ranks.
    """
    # Ids and log-probabilities of fp32 are exact in this type.
    out = torch.zeros((count, 2 + 2 * longest), dtype=torch.float64)
    for i, text in texts.items():
        row = [len(text.ids), ENDINGS.index(text.ended), *text.ids, *text.log_probabilities]
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def unpacked(rows: torch.Tensor) -> list[Continuation]:
    """Return the texts of `packed`."""
    texts = []
    for count, ended, *values in rows.tolist():
        n = int(count)
        ids = [int(value) for value in values[:n]]
        texts.append(Continuation(ids, ENDINGS[int(ended)], values[n : 2 * n]))
    return texts


def seed_of(run: RunConfig, sampling: Sampling, prompt: Prompt) -> int:
    """Return the seed of the draws of one answer, uint64."""
    seed = run.trainer.seed if sampling.seed is None else sampling.seed
    return int(np.random.SeedSequence((seed, prompt.number)).generate_state(1, np.uint64)[0])
