"""Which tokens of a chat are learned: the text that a template makes of it, and the parts that the
model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtrain.data.chat import ChatFormat
from mtrain.data.messages import Chat
from mtrain.data.tool_arguments import refuse_what_python_prints, settled
from mtrain.errors import CorruptData

if TYPE_CHECKING:  # it imports the library of tokenizers
    from mtrain.data.text import Tokenizer

NO_MARKS = "its chat template has no {% generation %}"
FIX = "data.chat_template=FILE with {% generation %}, data.loss_on=last or data.loss_on=all"


@dataclass(frozen=True)
class Encoded:
    """A chat as tokens."""

    ids: np.ndarray
    """int64 [tokens]"""
    learned: np.ndarray
    """bool [tokens]: of the first token it says nothing, since nothing comes before it."""
    parsed: bool = False
    """True where arguments of a tool were the text of JSON, and the template got the object."""


def encoded(chat: Chat, form: ChatFormat, tokenizer: Tokenizer, loss_on: str) -> Encoded:
    """Return the tokens of a chat, and which of them are learned by `loss_on` (`data.loss_on`).

    Raises:
        CorruptData: the template refuses the chat, does not say which part of it is whose, or
            nothing is learned.
    """
    wanted = _wanted(chat, loss_on)
    chat, parsed = settled(chat, form)
    if loss_on == "all":
        text = form.write(chat.messages, chat.tools, prompt=False).text
        parts = _between_parts(len(text), [_message(chat, form, text, i) for i in chat.left_out])
    else:
        text, parts = answers(chat, form, tokenizer.special_texts, wanted)
    refuse_what_python_prints(chat, text)
    ids, learned = tokenizer.encode_marked(text, parts)
    if not any(learned[1:]):
        raise CorruptData(
            "no token of it is learned: its chat template writes, or marks, nothing of the answers"
        )
    return Encoded(np.array(ids, np.int64), np.array(learned, np.bool_), parsed)


def _wanted(chat: Chat, loss_on: str) -> list[int]:
    """Return the messages that are learned by `loss_on`, and by what each of them says of itself.

    Raises:
        CorruptData: a message says that it is learned, and `loss_on` does not learn it; or nothing
            is left.
    """
    every = list(range(len(chat.messages)))
    by_key = {"all": every, "last": chat.answers[-1:], "assistant": chat.answers}[loss_on]
    for i in every:
        if chat.learned(i) and i not in by_key:
            who = chat.messages[i]["role"]
            fix = "all" if i not in chat.answers else "assistant"
            rule = (
                f"message {i + 1}, of {who}, says that it is learned, and data.loss_on={loss_on}"
                " does not learn it"
            )
            raise CorruptData(f"{rule}: remove that from the message, or data.loss_on={fix}")
    wanted = [i for i in by_key if chat.learned(i) is not False]
    if not wanted:
        raise CorruptData(
            f"all that data.loss_on={loss_on} learns of it says that it is not learned: remove the"
            " line"
        )
    return wanted


def _between_parts(end: int, left_out: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of a text of `end` letters lies between the parts that are left out."""
    bounds = [0, *(at for part in left_out for at in part), end]
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


def _message(chat: Chat, form: ChatFormat, text: str, number: int) -> tuple[int, int]:
    """Where a message of any role stands in the text of a chat, with all that the template writes
    of it.
    """
    before = _prefix(chat, form, number, prompt=False) if number else ""
    upto = (
        text if number + 1 == len(chat.messages) else _prefix(chat, form, number + 1, prompt=False)
    )
    if not (text.startswith(upto) and upto.startswith(before)):
        said = f"writes the first {number + 1} messages otherwise where others follow"
        raise CorruptData(
            f"{form.shown}: the template {said}: where message {number + 1} stands is not known"
        )
    return len(before), len(upto)


def answers(
    chat: Chat, form: ChatFormat, ends: tuple[str, ...], turns: list[int]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and where in it the messages `turns` of the assistant stand, each
    with the token of `ends` that ends it.

    A template that marks them is believed, as transformers does. Of any other it is proven that the
    text of the first messages is how the whole begins: a turn is then what stands between the text
    before it, up to where an answer begins, and the text with it.
    """
    written = form.write(chat.messages, chat.tools, prompt=False)
    if form.marks(with_tools=chat.tools is not None):
        first = turns[0]
        before = 0
        if any(one["role"] == "assistant" for one in chat.messages[:first]):
            before = len(form.write(chat.messages[:first], chat.tools, prompt=False).marked)
        if turns == [i for i in chat.answers if i >= first]:
            return written.text, written.marked[before:]
        return written.text, [
            part for turn in turns for part in _marked(chat, form, written.marked, turn)
        ]
    return written.text, [_between(chat, form, ends, written.text, turn) for turn in turns]


def _marked(
    chat: Chat, form: ChatFormat, marked: list[tuple[int, int]], turn: int
) -> list[tuple[int, int]]:
    """Return the marks of one turn among those of a whole chat: those that the messages up to it
    have more than the ones before it.
    """
    upto = form.write(chat.messages[: turn + 1], chat.tools, prompt=False).marked
    first = any(one["role"] == "assistant" for one in chat.messages[:turn])
    before = form.write(chat.messages[:turn], chat.tools, prompt=False).marked if first else []
    if marked[: len(upto)] != upto or upto[: len(before)] != before:
        said = f"marks the first {turn + 1} messages otherwise where others follow"
        raise CorruptData(
            f"{form.shown}: its chat template {said}: which marks are those of a message is not"
            " known"
        )
    return upto[len(before) :]


def _between(
    chat: Chat, form: ChatFormat, ends: tuple[str, ...], text: str, turn: int
) -> tuple[int, int]:
    """Where a turn stands in the text of a chat."""
    before = _prefix(chat, form, turn, prompt=True)
    upto = text
    if turn + 1 < len(chat.messages):
        upto = _prefix(chat, form, turn + 1, prompt=False)
    if not text.startswith(upto):
        what = f"writes the first {turn + 1} messages otherwise where others follow"
    elif not upto.startswith(before):
        what = (
            f"writes the beginning of message {turn + 1} otherwise than where an answer is"
            " asked for"
        )
    else:
        return len(before), _end(upto, len(before), ends)
    raise CorruptData(
        f"{form.shown}: {NO_MARKS}, and {what}: which tokens are the assistant's is not known;"
        f" {FIX}"
    )


def _prefix(chat: Chat, form: ChatFormat, count: int, *, prompt: bool) -> str:
    """Return the text of the first messages of a chat."""
    try:
        return form.write(chat.messages[:count], chat.tools, prompt=prompt).text
    except CorruptData as error:
        raise CorruptData(
            f"{form.shown}: {NO_MARKS}, and of the first {count} messages alone {error}; {FIX}"
        ) from None


def _end(text: str, start: int, ends: tuple[str, ...]) -> int:
    """Return the end of a turn: behind the special token that ends it, where spaces alone follow
    that.
    """
    end = len(text.rstrip())
    return end if end > start and text[:end].endswith(ends) else len(text)
