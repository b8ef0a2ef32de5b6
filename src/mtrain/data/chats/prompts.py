"""Prompts of a split, each answered several times, with their columns, which rewards read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtrain.data.chats.prepare import RECORDS
from mtrain.data.chats.samples import NOTHING, ChatSamples, Prepared, Sample, Windows
from mtrain.data.records import JsonLines
from mtrain.errors import ConfigError, CorruptData


class PromptSamples:
    """The answers to the prompts of a split: sample n answers prompt n // group, in the order in
    which `ChatSamples` has chats. A sample holds no answer until the run samples it.
    """

    group = 1
    """Answers to each prompt; the run sets it before it reads."""

    def __init__(
        self,
        prompts: Prepared,
        kept: np.ndarray,
        seq_length: int,
        seed: int,
        vocab_size: int,
        name: str,
        counts: dict[str, int],
    ) -> None:
        windows = Windows(kept, np.arange(len(kept) + 1))
        self._order = ChatSamples(prompts, windows, seq_length, seed, vocab_size, name, counts)
        self._prompts = prompts
        self._kept = kept
        self._vocab_size = vocab_size
        assert prompts.corpus.prefix is not None
        self._records = JsonLines(prompts.corpus.prefix.parent / RECORDS)
        if len(self._records) != len(prompts):
            raise CorruptData(f"{self._records.file}: not one line for each prompt: remove it")
        self.seq_length = seq_length
        self.name = name

    def __len__(self) -> int:
        return self.group * len(self._kept)

    def document(self, number: int) -> int:
        """Return the place of a sample's prompt in the file."""
        return int(self._kept[self._order.window_of(int(number) // self.group)])

    def ids(self, number: int) -> np.ndarray:
        """Return the tokens of a sample's prompt, all of them: int64 [tokens]."""
        document = self.document(number)
        length = int(self._prompts.dataset.lengths[document])
        return self._prompts.document(document, length, self._vocab_size)[0]

    def record(self, number: int) -> dict[str, Any]:
        """Return the columns of a sample's prompt."""
        found: dict[str, Any] = json.loads(self._records.line(self.document(number)))
        return found

    def sample(self, number: int) -> Sample:
        """Return the prompt of a sample, of which nothing is learned."""
        ids = self.ids(number)[: self.seq_length + 1]
        tokens = np.full(self.seq_length + 1, NOTHING, np.int64)
        tokens[: len(ids)] = ids
        return Sample(tokens, np.zeros(len(tokens), np.bool_), (0,), (self.document(number),))

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: prompts, `NOTHING` after their ends."""
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return file and line of a sample's prompt."""
        return self._prompts.place(self.document(number))

    def describe(self) -> dict[str, int]:
        """Return the numbers of prompts, tokens, and samples of an epoch."""
        return {**self._order.describe(), "samples": len(self)}

    def require_room(self, answer: int) -> None:
        """Raise ConfigError if a prompt leaves no room for an answer of so many tokens."""
        lengths = self._prompts.dataset.lengths[self._kept]
        room = self.seq_length + 1 - answer
        long = np.flatnonzero(lengths > room)
        if not len(long):
            return
        first = int(self._kept[long[0]])
        most = int(lengths.max())
        rule = (
            f"cannot hold a prompt and its answer because {self._prompts.place(first)} has"
            f" {self._prompts.dataset.lengths[first]} tokens and an answer has up to {answer}"
            f" ({len(long)} of {len(lengths)} prompts of {self.name} are too long, up to {most})"
        )
        fix = f"data.seq_length={most + answer - 1}"
        if self.seq_length + 1 > most:
            fix = f"{fix} or rollout.max_tokens={self.seq_length + 1 - most}"
        raise ConfigError.of("MT348", "data.seq_length", self.seq_length, rule, fix)
