"""The loss mask of a chat: the text that its template makes, and the parts that are the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtrain.data.chats.messages import Chat
from mtrain.data.chats.template import ChatFormat
from mtrain.data.chats.tool_arguments import refuse_python_repr, resolve_arguments
from mtrain.errors import CorruptData

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer

NO_MARKS = "its chat template has no {% generation %}"
FIX = "data.chat_template=FILE with {% generation %}, data.loss_on=last or data.loss_on=all"


@dataclass(frozen=True)
class EncodedChat:
    """A chat as tokens."""

    ids: np.ndarray
    """int64 [tokens]"""
    learned: np.ndarray
    """bool [tokens]; the first is not predicted, so its value has no effect."""
    parsed: bool = False
    """Whether the template got tool arguments parsed from their JSON text."""


def encode_chat(chat: Chat, form: ChatFormat, tokenizer: Tokenizer, loss_on: str) -> EncodedChat:
    """Return the tokens of a chat and their loss mask by `loss_on` (`data.loss_on`).

    Raises:
        CorruptData: the template refuses the chat, its parts cannot be attributed to messages, or
            nothing is learned.
    """
    wanted = _wanted(chat, loss_on)
    chat, parsed = resolve_arguments(chat, form)
    if loss_on == "all":
        text = form.write(chat.messages, chat.tools, prompt=False).text
        parts = _between_parts(len(text), [_message(chat, form, text, i) for i in chat.left_out])
    else:
        text, parts = answer_spans(chat, form, tokenizer.special_texts, wanted)
    refuse_python_repr(chat, text)
    ids, learned = tokenizer.encode_marked(text, parts)
    if not any(learned[1:]):
        raise CorruptData(
            "no token of it is learned: its chat template writes, or marks, no part of the answers"
        )
    return EncodedChat(np.array(ids, np.int64), np.array(learned, np.bool_), parsed)


def _wanted(chat: Chat, loss_on: str) -> list[int]:
    """Return the messages that are learned by `loss_on` and by their own flags.

    Raises:
        CorruptData: a message's flag has it learned while `loss_on` excludes it, or no message is
            left.
    """
    every = list(range(len(chat.messages)))
    by_key = {"all": every, "last": chat.answers[-1:], "assistant": chat.answers}[loss_on]
    for i in every:
        if chat.learned(i) and i not in by_key:
            who = chat.messages[i]["role"]
            fix = "all" if i not in chat.answers else "assistant"
            raise CorruptData(
                f"message {i + 1}, of {who}, says that it is learned, and data.loss_on={loss_on}"
                f" does not learn it: remove that from the message, or data.loss_on={fix}"
            )
    wanted = [i for i in by_key if chat.learned(i) is not False]
    if not wanted:
        raise CorruptData(
            f"all messages that data.loss_on={loss_on} learns say that they are not learned: remove"
            " the line"
        )
    return wanted


def _between_parts(end: int, left_out: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of a text of `end` characters between the parts that are left out."""
    bounds = [0, *(at for part in left_out for at in part), end]
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


def _message(chat: Chat, form: ChatFormat, text: str, number: int) -> tuple[int, int]:
    """Return the span of a message of any role in the text of a chat."""
    before = _prefix(chat, form, number, prompt=False) if number else ""
    upto = text
    if number + 1 < len(chat.messages):
        upto = _prefix(chat, form, number + 1, prompt=False)
    if not (text.startswith(upto) and upto.startswith(before)):
        raise CorruptData(
            f"{form.shown}: the template writes the first {number + 1} messages differently if"
            f" others follow: the place of message {number + 1} is not known"
        )
    return len(before), len(upto)


def answer_spans(
    chat: Chat, form: ChatFormat, ends: tuple[str, ...], turns: list[int]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the spans in it of the assistant's messages `turns`, each with
    the token of `ends` that ends it.

    The marks of a template are trusted, as transformers does. Without marks, the text of the first
    messages must be the beginning of the whole text. A turn is then the difference between the text
    before it, up to where an answer begins, and the text that includes it.
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
    """Return the marks of one turn: those that the turn adds to the marks of the messages before
    it.
    """
    upto = form.write(chat.messages[: turn + 1], chat.tools, prompt=False).marked
    first = any(one["role"] == "assistant" for one in chat.messages[:turn])
    before = form.write(chat.messages[:turn], chat.tools, prompt=False).marked if first else []
    if marked[: len(upto)] != upto or upto[: len(before)] != before:
        raise CorruptData(
            f"{form.shown}: its chat template marks the first {turn + 1} messages differently if"
            " others follow: the marks of one message are not known"
        )
    return upto[len(before) :]


def _between(
    chat: Chat, form: ChatFormat, ends: tuple[str, ...], text: str, turn: int
) -> tuple[int, int]:
    """Return the span of a turn in the text of a chat."""
    before = _prefix(chat, form, turn, prompt=True)
    upto = text
    if turn + 1 < len(chat.messages):
        upto = _prefix(chat, form, turn + 1, prompt=False)
    if not text.startswith(upto):
        why = f"writes the first {turn + 1} messages differently if others follow"
    elif not upto.startswith(before):
        why = f"writes the beginning of message {turn + 1} differently in a generation prompt"
    else:
        return len(before), _end(upto, len(before), ends)
    raise CorruptData(
        f"{form.shown}: {NO_MARKS}, and {why}: the assistant's tokens are not known; {FIX}"
    )


def _prefix(chat: Chat, form: ChatFormat, count: int, *, prompt: bool) -> str:
    """Return the text of the first messages of a chat."""
    try:
        return form.write(chat.messages[:count], chat.tools, prompt=prompt).text
    except CorruptData as error:
        raise CorruptData(
            f"{form.shown}: {NO_MARKS}, and for only the first {count} messages {error}; {FIX}"
        ) from None


def _end(text: str, start: int, ends: tuple[str, ...]) -> int:
    """Return the end of a turn: after the special token that ends it, if only spaces follow it."""
    end = len(text.rstrip())
    return end if end > start and text[:end].endswith(ends) else len(text)
