"""Arguments of tools that a chat has as the text of JSON: some templates write that text, others an object.

A template that writes `arguments | tojson` would put a backslash before each quote of a text, and one that walks over
`arguments.items()` ends with an error; one that writes `arguments`, or adds it to a text, wants the text.
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
    """A chat as a template is to be given it, and whether its arguments were parsed for that.

    They stay the text that they are where the template writes them as they stand. That is seen from the chat written
    once with arguments that stand nowhere else: its own may, and `{}` looks the same as a text and as an object.
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
    """The messages of a chat with `{"NAME": "NAME"}` for each text of arguments, and these names, which stand nowhere
    in it.
    """
    said = strict_json.dumps([chat.messages, chat.tools], ensure_ascii=False)
    names = list[str]()
    free = (f"argument{number}x" for number in count(1))

    def named(_: str) -> Any:
        names.append(next(name for name in free if name not in said))
        return strict_json.dumps({names[-1]: names[-1]})

    return [with_arguments(one, named) for one in chat.messages], names
