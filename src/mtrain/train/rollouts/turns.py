"""Answers of several turns: between those of the model, an environment writes messages.

Tokens are only appended. A turn of the model stays as it was sampled, and what follows it is what
the chat template writes after such a turn, which nothing is learned from. Each round of turns is a
call of an engine, so any engine samples them, and an answer depends on its own seed only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from mtrain import strict_json
from mtrain.data.chats.messages import parse_prompt
from mtrain.data.chats.template import ChatFormat
from mtrain.data.records import Keys
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import CorruptData
from mtrain.train.generate.request import END, LENGTH, Sampling
from mtrain.train.rollouts.engine import Engine, Prompt, Rollout

MARK = "mtrain-7c41-answer"
"""A text in the place of the model's answer, after which the template's own text is found."""
Reply = tuple[list[Any] | None, str]
"""Messages that follow, None where the answer ends; and why an environment failed."""


@dataclass
class _Talk:
    """An answer that grows."""

    prompt: Prompt
    messages: list[Any]
    """All messages so far."""
    tools: Any
    begin: int
    """Messages of the prompt."""
    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    """True for each token that the model sampled."""
    among: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens that each was drawn among, if the engine reports them."""
    ended: str = LENGTH
    version: int = 0
    why: str = ""

    def add(self, ids: Sequence[int], log_probabilities: Sequence[float], *, own: bool) -> None:
        """Append tokens."""
        self.ids += ids
        self.log_probabilities += log_probabilities
        self.own += [own] * len(ids)

    def whole(self) -> Rollout:
        """Return the answer."""
        return Rollout(
            self.prompt,
            tuple(self.ids),
            tuple(self.log_probabilities),
            self.ended,
            self.version,
            own=tuple(self.own),
            messages=tuple(self.messages[self.begin :]),
            why=self.why,
            among=tuple(self.among),
        )


@dataclass
class Turns:
    """An engine whose answers have up to `most` turns of the model."""

    engine: Engine
    tokenizer: Tokenizer
    form: ChatFormat
    keys: Keys
    """Keys of the lines of prompts, as the data was read."""
    most: int
    ask: Callable[[Sequence[tuple[list[Any], Mapping[str, Any]]]], list[Reply]] | None
    """A function that asks the environment, on the rank that has it."""
    tell: Callable[[str], str]
    """A function that broadcasts the text of that rank."""
    seed: int

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        """Return an answer to each prompt; see `Engine`. All turns of an answer, and what stands
        between them, have at most `sampling.tokens` tokens.
        """
        talks = []
        for prompt in prompts:
            chat = parse_prompt(dict(prompt.record), self.keys)
            talks.append(_Talk(prompt, list(chat.messages), chat.tools, len(chat.messages)))
        going = list(talks)
        for turn in range(self.most):
            if not going:
                break
            if not self._sample(going, sampling, turn):
                return None
            ended = [talk for talk in going if talk.ended == END]
            if turn + 1 == self.most:
                break
            replies = self._replies(ended)
            going = [
                talk
                for talk, reply in zip(ended, replies, strict=True)
                if self._goes_on(talk, reply, sampling.tokens)
            ]
        return [talk.whole() for talk in talks]

    def _sample(self, going: list[_Talk], sampling: Sampling, turn: int) -> bool:
        """Append a turn of the model to each answer; return False if a rank stops."""
        seed = self.seed if sampling.seed is None else sampling.seed
        if turn:
            # The first turn has the draws that it has without an environment.
            seed = int(np.random.SeedSequence((seed, turn)).generate_state(1, np.uint64)[0])
        left = [sampling.tokens - len(talk.ids) for talk in going]
        limits = replace(sampling, tokens=max(left), seed=seed)
        asked = [
            Prompt((*talk.prompt.ids, *talk.ids), talk.prompt.number, talk.prompt.record)
            for talk in going
        ]
        found = self.engine.generate(asked, limits)
        if found is None:
            return False
        for talk, rollout, most in zip(going, found, left, strict=True):
            # An engine has one limit for all: those with less room are cut.
            ids = rollout.ids[:most]
            talk.ended = rollout.ended if len(rollout.ids) <= most else LENGTH
            talk.version = rollout.version
            talk.add(ids, rollout.log_probabilities[:most], own=True)
            talk.among += rollout.among[:most]
            said = ids[:-1] if talk.ended == END else ids
            talk.messages.append({"role": "assistant", "content": self.tokenizer.decode(said)})
        return True

    def _replies(self, ended: list[_Talk]) -> list[Reply]:
        text = ""
        if self.ask is not None:
            asked = [(talk.messages, talk.prompt.record) for talk in ended]
            text = strict_json.dumps(self.ask(asked))
        return [(messages, why) for messages, why in json.loads(self.tell(text))]

    def _goes_on(self, talk: _Talk, reply: Reply, most: int) -> bool:
        """Append what the environment wrote; return whether the model has another turn."""
        messages, talk.why = reply
        if not messages:
            return False
        try:
            ids = self._following(talk, messages)
        except CorruptData as error:
            talk.why = f"the chat template refuses what the environment wrote: {error}"[:500]
            return False
        if ids is None:
            return False
        if len(talk.ids) + len(ids) >= most:
            # There is no room for a token of the model.
            talk.ended = LENGTH
            return False
        talk.messages += messages
        talk.add(ids, [0.0] * len(ids), own=False)
        # What nobody drew is certain.
        talk.among += [(one,) for one in ids] if talk.among else []
        return True

    def _following(self, talk: _Talk, messages: list[Any]) -> list[int] | None:
        """Return the tokens after the model's turn: the rest of it, the messages, and the beginning
        of its next turn; None where it ended the whole text, and not a turn.

        Raises:
            CorruptData: the template refuses the messages, or writes no such turn.
        """
        marked = [*talk.messages[:-1], {"role": "assistant", "content": MARK}]
        text = self.form.write([*marked, *messages], talk.tools, prompt=True).text
        end = self.tokenizer.token_of(talk.ids[-1]) or ""
        parts = text.split(f"{MARK}{end}")
        if len(parts) == 1 and end != self.form.special("eos_token"):
            return None
        if len(parts) != 2:
            raise CorruptData(f"it writes {end!r} after an answer {len(parts) - 1} times, not once")
        # With the end in front: some tokenizers begin a text with a space.
        first, *ids = self.tokenizer.encode(f"{end}{parts[1]}")
        if first != talk.ids[-1]:
            raise CorruptData(f"the tokenizer does not read {end!r} as one token")
        return ids

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Give the engine the weights."""
        self.engine.push(weights, version)

    def pause(self) -> None:
        """Pause the engine."""
        self.engine.pause()

    def resume(self) -> None:
        """Let the engine go on."""
        self.engine.resume()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
