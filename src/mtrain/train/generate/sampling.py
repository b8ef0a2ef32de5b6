"""The next token from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain.train.generate.request import Sampling


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Return a token id from `logits` [vocabulary], and the nats of its probability in the
    distribution that it was drawn from.
    """
    # The limit of the softmax: division by 0 is not it.
    if sampling.temperature == 0:
        return int(logits.argmax()), 0.0
    values = limited(logits / sampling.temperature, sampling)
    choice = int(torch.multinomial(torch.softmax(values, -1), 1, generator=generator))
    # The trainer rounds its sums to fp32; here nothing more is lost.
    return choice, float(values.double().log_softmax(-1)[choice])


def draw_among(
    logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float, list[int]]:
    """Return what `draw` returns, and the tokens that the limits keep: at most `top_k`, which is
    above 0, also where several have one logit.
    """
    values, ids = limited(logits / sampling.temperature, sampling).topk(
        min(sampling.top_k, len(logits))
    )
    choice = int(torch.multinomial(torch.softmax(values, -1), 1, generator=generator))
    value = float(values.double().log_softmax(-1)[choice])
    return int(ids[choice]), value, ids[values > -torch.inf].tolist()


def chosen(logits: Tensor, sampling: Sampling, noise: Tensor | None) -> Tensor:
    """Return token ids [rows] from `logits` [rows, vocabulary], without the host.

    With a temperature, `noise` has the shape of the logits and is drawn by `noise_of`. The ids are
    those that `draw` returns with the same generators: an exponential race is how
    `torch.multinomial` draws one number.
    """
    if noise is None:
        return logits.argmax(-1)
    probabilities = torch.softmax(limited(logits / sampling.temperature, sampling), -1)
    return (probabilities / noise).argmax(-1)


def noise_of(vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return the random numbers [vocabulary] of the next token of one text."""
    return torch.empty(vocabulary).exponential_(generator=generator)


def limited(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return `logits` [..., vocabulary] with minus infinity for tokens that top_k, then top_p
    (arXiv:1904.09751), then min_p (arXiv:2407.01082) leave out; the most likely one always stays.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(
            logits < logits.topk(sampling.top_k).values[..., -1:], -torch.inf
        )
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        # Probability of all more likely tokens: the first token that passes top_p stays.
        before = probabilities.cumsum(-1) - probabilities
        left_out = before >= sampling.top_p
        # The most likely token may exceed top_p by itself.
        left_out[..., :1].fill_(False)
        places = torch.zeros_like(left_out).scatter(-1, order, left_out)
        logits = logits.masked_fill(places, -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(
            probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -torch.inf
        )
    return logits
