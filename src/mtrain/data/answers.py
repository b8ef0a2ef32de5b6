"""Micro-batches of sampled answers: prompt and answer in a row each, with the answer's advantage
and the log-probabilities that its tokens were sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from mtrain.data.batch import Collator, MicroBatch, Source, averaged, collate
from mtrain.data.chats.samples import NOTHING, PromptSamples, Sample


@dataclass(frozen=True)
class Answer:
    """An answer with its advantage."""

    prompt: np.ndarray
    """int64 [tokens]"""
    ids: np.ndarray
    """int64 [tokens]: the sampled tokens, at least one."""
    log_probabilities: np.ndarray
    """float32 [tokens]: nats of the sampled tokens."""
    advantages: np.ndarray | float = 0.0
    """The advantage of each sampled token, or one number for all of them."""
    own: np.ndarray | None = None
    """bool [tokens]: False for a token that a tool or a user wrote, which nothing is learned from;
    None: the policy sampled all.
    """
    among: Sequence[Sequence[int]] = ()
    """The tokens that each was drawn among; empty: all."""
    returns: np.ndarray | None = None
    """The targets of a critic, and below its values; None: the run has no critic."""
    values: np.ndarray | None = None
    routes: np.ndarray | None = None
    """int16 [tokens, layers, k]: experts that the sampler sent prompt and answer to, but for the
    last token; None: not recorded.
    """


def answer_batch(
    answers: Sequence[Answer], length: int, divisor: str, most_tokens: int
) -> MicroBatch:
    """Return the micro-batch of answers, a row of `length` tokens for each.

    `divisor` is `ObjectiveConfig.divisor`: `token` weighs each sampled token by 1 and counts it;
    `sequence` weighs those of an answer by 1 together and counts the answer; `constant` weighs each
    by 1 and counts `most_tokens` for an answer.
    """
    rows = []
    beside = np.zeros((4, len(answers), length), np.float32)
    for place, answer in enumerate(answers):
        start = len(answer.prompt)
        end = start + len(answer.ids)
        tokens = np.full(length + 1, NOTHING, np.int64)
        tokens[:start] = answer.prompt
        tokens[start:end] = answer.ids
        learned = np.zeros(length + 1, np.bool_)
        learned[start:end] = True if answer.own is None else answer.own
        rows.append(Sample(tokens, learned, (0,), ()))
        # A label is the token after its place.
        labels = slice(start - 1, end - 1)
        beside[0, place, labels] = answer.advantages * learned[start:end]
        beside[1, place, labels] = answer.log_probabilities
        if answer.returns is not None:
            beside[2, place, labels] = answer.returns
            beside[3, place, labels] = answer.values
    batch = collate(rows, packed=False)
    batch["advantages"], batch["sampled_log_probabilities"] = torch.from_numpy(beside[:2])
    if any(answer.returns is not None for answer in answers):
        batch["returns"], batch["old_values"] = torch.from_numpy(beside[2:])
    if any(answer.among for answer in answers):
        # A key of the model's, as those of a family.
        among = {"drawn_among": _among(answers, batch["labels"])}
        batch = cast(MicroBatch, {**batch, **among})
    recorded = [answer.routes for answer in answers if answer.routes is not None]
    if recorded:
        # Routers choose for padding, and for the last token, which the sampler did not read.
        routes = np.full((len(answers), length, *recorded[0].shape[1:]), -1, np.int16)
        for row, own in zip(routes, recorded, strict=True):
            row[: len(own)] = own
        batch["routes"] = torch.from_numpy(routes)
    if divisor == "constant":
        first = [len(answer.prompt) - 1 for answer in answers]
        counts = torch.zeros_like(batch["loss_mask"])
        counts[torch.arange(len(answers)), torch.tensor(first)] = float(most_tokens)
        return cast(MicroBatch, {**batch, "loss_counts": counts})
    return averaged(batch, divisor, len(answers))


def _among(answers: Sequence[Answer], labels: torch.Tensor) -> torch.Tensor:
    """Return the tokens that each label was drawn among, int64 [rows, length, k], -1 for none."""
    width = max(len(ids) for answer in answers for ids in answer.among)
    found = torch.full((*labels.shape, width), -1, dtype=torch.int64)
    # Labels that nobody drew are certain: their loss has no weight.
    found[..., 0] = labels
    for row, answer in zip(found, answers, strict=True):
        for place, ids in enumerate(answer.among, len(answer.prompt) - 1):
            row[place] = torch.tensor([*ids, *[-1] * (width - len(ids))])
    return found


class MockAnswers:
    """Synthetic answers of lengths that differ, with advantages of both signs; for plans and for
    proofs of layouts, where no policy samples.
    """

    def __init__(self, source: Source, *, criticised: bool = False) -> None:
        self.source = source
        self.criticised = criticised

    def answer(self, number: int) -> Answer:
        """Return the answer of a sample, a function of its number."""
        (window,) = self.source.batch(np.array([number]))
        length = len(window) - 1
        start = max(1, length // 4)
        end = max(start + 1, length + 1 - int(number) * 5 % (length // 2))
        dice = np.random.default_rng(int(number))
        values = dice.standard_normal(end - start + 1).astype(np.float32)
        answer = Answer(window[:start], window[start:end], values[1:] / 50 - 5, float(values[0]))
        if not self.criticised:
            return answer
        more = dice.standard_normal((3, end - start)).astype(np.float32)
        return replace(answer, advantages=more[0], returns=more[1], values=more[2])


def answer_collator(
    source: Source, divisor: str, most_tokens: int, *, criticised: bool = False
) -> Collator:
    """Return the collator of prompts for sampled answers, or of synthetic answers, which a critic
    has judged if they are `criticised`.
    """

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        if isinstance(source, PromptSamples):
            return collate([source.sample(number) for number in numbers], packed=False)
        answers = MockAnswers(source, criticised=criticised)
        rows = [answers.answer(number) for number in numbers]
        return answer_batch(rows, windows.shape[1] - 1, divisor, most_tokens)

    return collator
