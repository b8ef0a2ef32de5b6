"""Micro-batches of answers: those of pairs, in rows of their own or packed, and labelled ones."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from mtrain.data.batch import OTHER, Collator, MicroBatch, Source, collate
from mtrain.data.chats.samples import NOTHING, ChatSamples, PairSamples, Sample


class MockPairs:
    """Synthetic answers of lengths that differ, with the part of `PairSamples` that collators use.

    The first quarter of an answer serves as the prompt, which is not learned. With `multiple`, a
    sample is two pairs, whose answers begin at multiples of it.
    """

    def __init__(self, source: Source, multiple: int | None = None) -> None:
        self.source = source
        self.multiple = multiple

    def sample(self, number: int) -> Sample:
        """Return one answer of a pair, or a window of two pairs."""
        (window,) = self.source.batch(np.array([number]))
        if self.multiple is None:
            return self._answer(window, number)
        return self._packed(window, number, self.multiple)

    def _packed(self, window: np.ndarray, number: int, multiple: int) -> Sample:
        length = len(window) - 1
        count = 4 if length >= 4 * multiple else 2
        room = length // count // multiple * multiple
        end = count * room
        starts = tuple(range(0, end, room))
        tokens = np.full(length + 1, NOTHING, np.int64)
        learned = np.zeros(length + 1, np.bool_)
        for place, start in enumerate(starts):
            one = self._answer(window[start : start + room + 1], 4 * number + place)
            tokens[start : start + room] = one.tokens[:room]
            learned[start : start + room] = one.learned[:room]
        starts += (end,) if end < length else ()
        return Sample(tokens, learned, starts, (int(number),))

    def _answer(self, window: np.ndarray, number: int) -> Sample:
        length = len(window) - 1
        end = length - int(number) * 5 % (length // 2)
        places = np.arange(length + 1)
        learned = (places > length // 4) & (places <= end)
        tokens = np.where(places <= end, window, NOTHING)
        return Sample(tokens, learned, (0,), (int(number),), number % 2 == 0)


def pair_collator(
    source: Any, *, mismatched: bool, at_ends: bool = False, margins: bool = False
) -> Collator:
    """Return the collator for answers of pairs, from a source such as `PairSamples`, or for
    labelled ones of `ChatSamples`.

    `mismatched` adds after each prompt the answer of the same kind of the next pair, or the next
    labelled answer. `at_ends` weighs the last token of each answer, in its own place, instead of
    the predictions. `margins` adds how much better chosen answers are.
    """
    step = 1 if isinstance(source, ChatSamples) else 2

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        samples = [source.sample(number) for number in numbers]
        batch = collate(samples, packed=False)
        if at_ends:
            batch["loss_mask"] = at_last_tokens(samples)
        if margins:
            given = np.array([sample.margin for sample in samples])
            batch["margins"] = at_first_labels(batch["loss_mask"], given)
        if isinstance(source, PairSamples) and source.scores is not None:
            scores = source.scores[[source.row_of(number) for number in numbers]]
            batch["reference_log_probabilities"] = at_first_labels(batch["loss_mask"], scores)
        if not mismatched:
            return batch
        kinds = np.array([sample.chosen for sample in samples], np.float64)
        batch["desirable"] = at_first_labels(batch["loss_mask"], kinds)
        others = [source.sample(number + step) for number in numbers]
        rows = [joined_at_answers(*both) for both in zip(samples, others, strict=True)]
        added = collate(rows, packed=False)
        own = {OTHER + key: added[key] for key in ("tokens", "labels", "loss_mask", "padding")}  # type: ignore[literal-required]
        return cast(MicroBatch, {**batch, **own})

    return collator


def at_last_tokens(samples: list[Sample]) -> torch.Tensor:
    """Return 1 at the last input of each sample that is a token, and 0 elsewhere: fp32 [n, s]."""
    held = np.stack([sample.tokens[:-1] != NOTHING for sample in samples])
    last = held.shape[1] - 1 - held[:, ::-1].argmax(axis=1)
    found = np.zeros(held.shape, np.float32)
    found[np.arange(len(samples)), last] = 1
    return torch.from_numpy(found)


def packed_pair_collator(source: Any) -> Collator:
    """Return the collator for windows of pairs, from packed `ChatSamples` or `MockPairs`.

    Answers do not attend to each other; both of a pair are in one row.
    """

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        samples = [source.sample(number) for number in numbers]
        batch = collate(samples, packed=True)
        length = batch["tokens"].shape[1] // len(samples)
        of = np.zeros((len(samples), length), np.int64)
        first = 0
        for row, sample in zip(of, samples, strict=True):
            # Tokens after the last answer of a row count with it, and have no weight.
            count = len(sample.starts) // 2 * 2
            row[list(sample.starts[1:count])] = 1
            row[:] = first + row.cumsum()
            first += count
        batch["answers"] = torch.from_numpy(of).view(1, -1)
        return batch

    return collator


def at_first_labels(mask: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Return each row's value at its first learned label, and 0 elsewhere: fp64 [n, s].

    A sum over the labels of a row is then its value, also where ranks have parts of the row.
    """
    first = mask.argmax(dim=1, keepdim=True)
    out = torch.zeros(mask.shape, dtype=torch.float64)
    return out.scatter_(1, first, torch.from_numpy(values)[:, None])


def joined_at_answers(sample: Sample, other: Sample) -> Sample:
    """Return the prompt of a sample, up to its first learned token, and the answer of another."""
    start = int(sample.learned.argmax())
    first = int(other.learned.argmax())
    length = len(sample.tokens)
    rest = length - start
    tokens = np.full(length, NOTHING, np.int64)
    learned = np.zeros(length, np.bool_)
    tokens[:start] = sample.tokens[:start]
    answer = other.tokens[first : first + rest]
    tokens[start : start + len(answer)] = answer
    learned[start : start + len(answer)] = other.learned[first : first + rest]
    return Sample(tokens, learned, sample.starts, (*sample.documents, *other.documents))
