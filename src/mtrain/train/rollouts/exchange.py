"""Answers as numbers, for exchanges between ranks, and the seeds of their draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.train.generate.request import ENDINGS, Continuation, Sampling
from mtrain.train.rollouts.engine import Prompt


def packed(
    texts: Mapping[int, Continuation], count: int, longest: int, kept: int = 0
) -> torch.Tensor:
    """Return texts of at most `longest` tokens by their number, as float64 [count, 2 + (2 + `kept`)
    longest]; zeros for those of other ranks. Each token was drawn among at most `kept` tokens,
    which are reported; 0: they are not.
    """
    # Ids and log-probabilities of fp32 are exact in this type.
    out = torch.zeros((count, 2 + (2 + kept) * longest), dtype=torch.float64)
    for i, text in texts.items():
        row = [len(text.ids), ENDINGS.index(text.ended), *text.ids, *text.log_probabilities]
        if kept:
            # Ids + 1: 0 is a place without a token.
            wide = ([*(one + 1 for one in ids), *[0] * (kept - len(ids))] for ids in text.among)
            row += [one for ids in wide for one in ids]
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def unpacked(rows: torch.Tensor, kept: int = 0) -> list[Continuation]:
    """Return the texts of `packed`."""
    texts = []
    for count, ended, *values in rows.tolist():
        n = int(count)
        ids = [int(value) for value in values[:n]]
        text = Continuation(ids, ENDINGS[int(ended)], values[n : 2 * n])
        if kept:
            wide = [int(value) - 1 for value in values[2 * n : (2 + kept) * n]]
            each = (wide[begin : begin + kept] for begin in range(0, n * kept, kept))
            text.among = [[one for one in ids if one >= 0] for ids in each]
        texts.append(text)
    return texts


def seed_of(run: RunConfig, sampling: Sampling, prompt: Prompt) -> int:
    """Return the seed of the draws of one answer, uint64."""
    seed = run.trainer.seed if sampling.seed is None else sampling.seed
    return int(np.random.SeedSequence((seed, prompt.number)).generate_state(1, np.uint64)[0])
