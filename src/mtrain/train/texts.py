"""Texts after texts: prompts to tokens, tokens to what follows, and where that ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mtrain.data.chat import ChatFormat
from mtrain.data.text import Tokenizer
from mtrain.train.request import END, LENGTH, STOP, Continuation, Request, Written

if TYPE_CHECKING:
    from mtrain.train.generate import Sampler


def continued(sampler: Sampler, tokenizer: Tokenizer, request: Request) -> list[Written]:
    """What follows each prompt, in their order; prompts of similar length are computed together."""
    prompts = [encoded(tokenizer, prompt) for prompt in request.prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows = request.rows if sampler.independent else 1
    ending = endings(tokenizer, request.stop)
    found: dict[int, Continuation] = {}
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        texts = sampler.continued([prompts[i] for i in group], request.sampling, ending=ending)
        assert texts is not None  # nothing stops it
        found |= zip(group, texts, strict=True)
    return [
        Written(
            prompt,
            _following(tokenizer, prompts[i], found[i], request.stop),
            len(found[i].ids),
            found[i].ended,
        )
        for i, prompt in enumerate(request.prompts)
    ]


def encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a text; of one without any, the end of a document."""
    return tokenizer.encode(prompt) or [tokenizer.eod or 0]


def endings(tokenizer: Tokenizer, stop: Sequence[str]) -> Callable[[list[int]], str]:
    """Return a function that says of the tokens added so far whether the text ends with them: see
    `Sampler.continued`.
    """
    names = (ChatFormat(tokenizer.path.parent).special("eos_token"),)
    ends = {tokenizer.eod, *(tokenizer.id_of(name) for name in names if name)} - {None}
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
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode(prompt + ids)
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)
    if added.ended != STOP:
        return text
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]
