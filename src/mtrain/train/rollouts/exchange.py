"""Answers as numbers, for exchanges between ranks, and the seeds of their draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.train.generate.request import ENDINGS, Continuation, Sampling
from mtrain.train.rollouts.engine import Prompt
from mtrain.world.heartbeat import waiting

EXCHANGED = 2**26
"""Bytes of routes that ranks exchange at once; a longer text goes by itself."""


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


def whole_routes(
    own: Mapping[int, torch.Tensor],
    tokens: Sequence[int],
    layers: Sequence[int],
    shape: tuple[int, int],
    device: torch.device,
) -> list[np.ndarray]:
    """Return the experts of so many `tokens` of each text, int16 [tokens, layers, k], on all ranks.

    `own` has this rank's part of some texts, [tokens, own `layers`, k], and 0 for what others have;
    `shape` is all layers, and k.
    """
    routes: list[np.ndarray] = []
    size = 2 * shape[0] * shape[1]
    while len(routes) < len(tokens):
        begin = len(routes)
        sums = np.cumsum(tokens[begin:])
        # A few texts at a time, so that devices need little memory.
        count = max(1, int(np.searchsorted(sums, EXCHANGED // size, side="right")))
        sent = torch.zeros((int(sums[count - 1]), *shape), dtype=torch.int16)
        parts = sent.split(list(tokens[begin : begin + count]))
        for number, part in enumerate(parts, begin):
            if number in own:
                part[:, list(layers)] = own[number]
        # One rank has each of these numbers, so adding them up carries nothing between bytes; few
        # backends add 16 bits.
        summed = sent.to(device).view(torch.uint8)
        with waiting():
            dist.all_reduce(summed)
        whole = summed.cpu().view(torch.int16).split(list(tokens[begin : begin + count]))
        routes += [part.numpy() for part in whole]
    return routes


def seed_of(run: RunConfig, sampling: Sampling, prompt: Prompt) -> int:
    """Return the seed of the draws of one answer, uint64."""
    seed = run.trainer.seed if sampling.seed is None else sampling.seed
    return int(np.random.SeedSequence((seed, prompt.number)).generate_state(1, np.uint64)[0])
