"""The loss mask of a chat: the text that its template makes, and the parts that are the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain import strict_json
from mtrain.data.chats.messages import Chat, with_arguments
from mtrain.data.chats.template import ChatFormat
from mtrain.errors import CorruptData

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer


# `{% generation %}` is transformers' tag around the parts of a template that the model writes
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
    """True if the template received tool arguments parsed from their JSON text."""
    chosen: bool = True
    """False for the rejected answer of a pair, and for one with a label of false."""
    margin: float = 0.0
    """The margin of a pair, with its chosen answer."""


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
    # the whole text at once: parts that are tokenized separately may have other tokens
    ids, learned = tokenizer.encode_marked(text, parts)
    if not any(learned[1:]):
        raise CorruptData(
            "no token of it is learned: its chat template writes, or marks, no part of the answers"
        )
    return EncodedChat(np.array(ids, np.int64), np.array(learned, np.bool_), parsed)


def encode_prompt(chat: Chat, form: ChatFormat, tokenizer: Tokenizer) -> EncodedChat:
    """Return the tokens of a chat up to where the model answers; none is learned.

    Raises:
        CorruptData: the template refuses the chat, or makes no token of it.
    """
    chat, parsed = resolve_arguments(chat, form)
    text = form.write(chat.messages, chat.tools, prompt=True).text
    refuse_python_repr(chat, text)
    ids = tokenizer.encode(text)
    if not ids:
        raise CorruptData("its chat template makes no token of it")
    return EncodedChat(np.array(ids, np.int64), np.zeros(len(ids), np.bool_), parsed)


def _wanted(chat: Chat, loss_on: str) -> list[int]:
    """Return the messages that are learned by `loss_on` and by their own flags.

    Raises:
        CorruptData: a message's flag has it learned while `loss_on` excludes it, or no message
            remains.
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
        # all later answers are learned, so there is no need to find out which mark is whose
        if turns == [i for i in chat.answers if i >= first]:
            return written.text, written.marked[before:]
        return written.text, [
            part for turn in turns for part in _marked(chat, form, written.marked, turn)
        ]
    return written.text, [_between(chat, form, ends, written.text, turn) for turn in turns]


def _marked(
    chat: Chat, form: ChatFormat, marked: list[tuple[int, int]], turn: int
) -> list[tuple[int, int]]:
    """Return the marks that one turn adds to those of the messages before it."""
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
    # a generation prompt has the beginning of an answer, such as its role, which is not learned
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
    # templates put a line break after the token that ends a turn; a model never has to write it
    end = len(text.rstrip())
    return end if end > start and text[:end].endswith(ends) else len(text)


def resolve_arguments(chat: Chat, form: ChatFormat) -> tuple[Chat, bool]:
    """Return a chat in the form that its template needs, and whether its arguments were parsed.

    Arguments stay text if the template writes them unchanged. A rendering with probe arguments that
    occur nowhere else shows that; the chat's own might occur elsewhere, and `{}` looks the same as
    a text and as an object.
    """
    if chat.objects is None:
        return chat, False
    messages, names = probes(chat)
    try:
        text = form.write(messages, chat.tools, prompt=False).text
    except CorruptData:  # the template cannot handle a text
        return replace(chat, messages=chat.objects), True
    # a template may leave earlier calls out, so not every probe needs to be in the text
    as_given = [text.count(strict_json.dumps({name: name})) for name in names]
    # each probe is a key and its value, so its name is twice in a text that was not parsed
    changed = any(text.count(name) != 2 * many for name, many in zip(names, as_given, strict=True))
    if any(as_given) and not changed:
        return chat, False
    return replace(chat, messages=chat.objects), True


def probes(chat: Chat) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a chat with `{"NAME": "NAME"}` for each text of arguments, and these
    names, which occur nowhere else in it.
    """
    chat_text = strict_json.dumps([chat.messages, chat.tools], ensure_ascii=False)
    names = list[str]()
    free = (f"argument{number}x" for number in count(1))

    def named(_: str) -> Any:
        names.append(next(name for name in free if name not in chat_text))
        return strict_json.dumps({names[-1]: names[-1]})

    return [with_arguments(one, named) for one in chat.messages], names


def refuse_python_repr(chat: Chat, text: str) -> None:
    """Refuse a text with the Python repr of a list or an object of the chat, a template's mistake.

    Raises:
        CorruptData: the template needs one text for the content of a message, or JSON text for
            arguments.
    """
    contents = [one["content"] for one in chat.messages if isinstance(one.get("content"), str)]
    # jinja2 prints whatever it is given: a model would learn to write Python's quotes
    for number, message in enumerate(chat.messages, 1):
        parts = message.get("content")
        if isinstance(parts, list) and parts and _is_printed(parts, text, contents):
            what = "its content, a list of parts"
            fix = "make them one text"
        elif any(_is_printed(one, text, contents) for one in _objects(message)):
            what = "the arguments of its call, an object"
            fix = "make it JSON text"
        else:
            continue
        raise CorruptData(
            f"message {number}: the chat template writes {what}, as Python prints it: {fix}, or "
            "data.chat_template=FILE that reads it"
        )


def _is_printed(value: Any, text: str, contents: list[str]) -> bool:
    """Return whether a text contains the `str()` of a value more often than the messages do."""
    printed = str(value)
    return text.count(printed) > sum(one.count(printed) for one in contents)


def _objects(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the argument objects of a message's calls, without {}, whose repr is its JSON."""
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    functions = [one.get("function", one) for one in calls if isinstance(one, dict)]
    arguments = [one.get("arguments") for one in functions if isinstance(one, dict)]
    return [one for one in arguments if isinstance(one, dict) and one]
