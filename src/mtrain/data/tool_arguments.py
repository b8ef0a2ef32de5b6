"""Tool arguments that a chat stores as JSON text: some templates want the text, others an object.

A template that writes `arguments | tojson` would escape each quote of a text, and one that iterates
over `arguments.items()` would fail. One that writes `arguments`, or appends it, wants the text.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from mtrain import strict_json
from mtrain.data.chat import ChatFormat
from mtrain.data.messages import Chat, with_arguments
from mtrain.errors import CorruptData


def settled(chat: Chat, form: ChatFormat) -> tuple[Chat, bool]:
    """Return a chat as a template is to be given it, and whether its arguments were parsed for
    that.

    They stay the text that they are where the template writes them as they stand. That is seen from
    the chat written once with arguments that stand nowhere else: its own may, and `{}` looks the
    same as a text and as an object.
    """
    if chat.objects is None:
        return chat, False
    asked, names = probes(chat)
    try:
        text = form.write(asked, chat.tools, prompt=False).text
    except CorruptData:  # the template cannot do with a text
        return replace(chat, messages=chat.objects), True
    # a template may leave earlier calls out, so not every one needs to stand in it
    as_given = [text.count(strict_json.dumps({name: name})) for name in names]
    changed = any(text.count(name) != 2 * many for name, many in zip(names, as_given, strict=True))
    if any(as_given) and not changed:
        return chat, False
    return replace(chat, messages=chat.objects), True


def probes(chat: Chat) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a chat with `{"NAME": "NAME"}` for each text of arguments, and these
    names, which stand nowhere in it.
    """
    said = strict_json.dumps([chat.messages, chat.tools], ensure_ascii=False)
    names = list[str]()
    free = (f"argument{number}x" for number in count(1))

    def named(_: str) -> Any:
        names.append(next(name for name in free if name not in said))
        return strict_json.dumps({names[-1]: names[-1]})

    return [with_arguments(one, named) for one in chat.messages], names


def refuse_what_python_prints(chat: Chat, text: str) -> None:
    """Refuse a text in which a list or an object of the chat stands as Python prints it: nobody
    writes such answers.

    Raises:
        CorruptData: the template wants one text for the content of a message, or JSON text for
            arguments.
    """
    said = [one["content"] for one in chat.messages if isinstance(one.get("content"), str)]
    for number, message in enumerate(chat.messages, 1):
        parts = message.get("content")
        if isinstance(parts, list) and parts and _is_printed(parts, text, said):
            what = "its content, a list of parts"
            fix = "make them one text"
        elif any(_is_printed(one, text, said) for one in _objects(message)):
            what = "the arguments of its call, an object"
            fix = "make it JSON text"
        else:
            continue
        raise CorruptData(
            f"message {number}: the chat template writes {what}, as Python prints it: {fix}, or "
            "data.chat_template=FILE that reads it"
        )


def _is_printed(value: Any, text: str, said: list[str]) -> bool:
    """Return whether a text contains the `str()` of a value more often than the messages themselves
    do.
    """
    printed = str(value)
    return text.count(printed) > sum(one.count(printed) for one in said)


def _objects(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that the calls of a message have as arguments, but empty ones, which are
    printed as JSON is.
    """
    calls = [*(message.get("tool_calls") or ()), message.get("function_call")]
    inner = [one.get("function", one) for one in calls if isinstance(one, dict)]
    found = [one.get("arguments") for one in inner if isinstance(one, dict)]
    return [one for one in found if isinstance(one, dict) and one]
