"""Tool arguments that a chat stores as JSON text: some templates need the text, others an object.

A template that writes `arguments | tojson` would escape each quote of a text, and one that iterates
over `arguments.items()` would fail. One that writes `arguments`, or appends it, needs the text.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from mtrain import strict_json
from mtrain.data.chats.messages import Chat, with_arguments
from mtrain.data.chats.template import ChatFormat
from mtrain.errors import CorruptData


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
