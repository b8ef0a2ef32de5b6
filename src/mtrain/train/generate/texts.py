"""Continuations of texts: prompts to tokens, tokens to text, and the end of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mtrain.data.chats.template import ChatFormat
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.train.generate.request import END, LENGTH, STOP, Continuation, Request, Written

if TYPE_CHECKING:
    from mtrain.train.generate.sampler import Sampler


def continued(sampler: Sampler, tokenizer: Tokenizer, request: Request) -> list[Written]:
    """Return the texts after prompts, in order; prompts of similar length run together."""
    prompts = [encoded(tokenizer, prompt) for prompt in request.prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows = request.rows if sampler.independent else 1
    ending = endings(tokenizer, request.stop)
    continuations: dict[int, Continuation] = {}
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        # One call for the group: all ranks sample it together.
        texts = sampler.continued([prompts[i] for i in group], request.sampling, ending=ending)
        assert texts is not None  # nothing stops it
        continuations |= zip(group, texts, strict=True)
    return [
        Written(
            prompt,
            _following(tokenizer, prompts[i], continuations[i], request.stop),
            len(continuations[i].ids),
            continuations[i].ended,
        )
        for i, prompt in enumerate(request.prompts)
    ]


def encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a text; of an empty text, the end of a document."""
    return tokenizer.encode(prompt) or [tokenizer.eod or 0]


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: of a document, and of a turn of its chat template."""
    name = ChatFormat(tokenizer.path.parent).special("eos_token")
    ends = {tokenizer.eod, tokenizer.id_of(name) if name else None}
    return frozenset(end for end in ends if end is not None)


def endings(tokenizer: Tokenizer, stop: Sequence[str]) -> Callable[[list[int]], str]:
    """Return a function from the added tokens to their ending: see `Sampler.continued`."""
    ends = ends_of(tokenizer)
    # a token has at least a byte of text, and the first of a few may lose its space
    span = max((len(text.encode()) for text in stop), default=0) + 4

    def ending(ids: list[int]) -> str:
        if ids[-1] in ends:
            return END
        tail = tokenizer.decode(ids[-span:]) if stop else ""
        return STOP if any(text in tail for text in stop) else LENGTH

    return ending


def _following(
    tokenizer: Tokenizer, prompt: list[int], added: Continuation, stop: Sequence[str]
) -> str:
    ids = added.ids[:-1] if added.ended == END else added.ids
    # Decoded with the prompt: the first token of a text may lose its leading space.
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + ids)
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)
    if added.ended != STOP:
        return text
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]
