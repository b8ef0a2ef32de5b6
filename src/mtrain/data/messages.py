"""Chats of a JSON Lines file: the messages of a line, in the forms in use, with their roles in
order.

Forms: {"messages": [{"role": ..., "content": ...}, ...]} as OpenAI's API has it, with `tool_calls`
and tools; and {"conversations": [{"from": "human", "value": ...}, ...]} of ShareGPT. Beside them
stand `tools`, a list or a text of one, and `system`, a text. Pairs have `chosen` and `rejected`
beside a `prompt`, or begin alike: https://huggingface.co/docs/trl/dataset_formats
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtrain.data.chat import REASONING
from mtrain.data.record_keys import FLAGS, Keys, learned, require_learned
from mtrain.errors import CorruptData

MAX_LINE = 64 << 20
MAX_DEPTH = 200
"""Lists and objects inside each other: what writes a chat calls itself for each."""
Message = dict[str, Any]
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "function_call",
    "system": "system",
}
"""What ShareGPT's `from` says, and the role that it is."""
ASSISTANT = "assistant"
AFTER: dict[str, tuple[str, ...]] = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": (ASSISTANT,),
    ASSISTANT: ("user", "tool", "function"),
    "tool": ("tool", "function", ASSISTANT),
    "function": ("tool", "function", ASSISTANT),
}
"""Who may speak after whom."""
OF_A_CHAT = ("messages", "conversations", "tools", "system", "prompt")
OF_A_PAIR = (*OF_A_CHAT, "chosen", "rejected")
OF_A_MESSAGE = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call"),
    *(*REASONING, "refusal"),
)
OF_A_TURN = ("from", "value")
OF_A_PART = ("type", "text")
BESIDE_CONTENT = {
    **{key: (key,) for key in ("tool_calls", "function_call", "refusal")},
    **dict.fromkeys(REASONING, REASONING),
}
"""Keys of a message that say something beside its content -> the keys under which a template may
read it: one that reads none of them would lose it.
"""
NO_KEYS = Keys()


class NoJson(CorruptData):
    """A line that is no JSON or no UTF-8: damage of the file, not a chat that is wrong."""


@dataclass(frozen=True)
class Chat:
    """A conversation, as a chat template reads it."""

    messages: list[Message]
    tools: list[Any] | None = None
    begin: int = 0
    """The first message of which something is learned."""
    said: tuple[bool | None, ...] = ()
    """Whether each message says of itself that it is learned; None: it does not say."""
    objects: list[Message] | None = None
    """The messages with objects for arguments of tools that are the text of JSON; None: none are.
    """

    @property
    def turns(self) -> list[int]:
        """Return the messages of the assistant, of which something is learned."""
        return [i for i in self.answers if self.learned(i) is not False]

    @property
    def answers(self) -> list[int]:
        """Return the messages of the assistant that are not only the beginning of a pair."""
        return [
            i for i, one in enumerate(self.messages) if i >= self.begin and one["role"] == ASSISTANT
        ]

    def learned(self, message: int) -> bool | None:
        """Return whether a message says that it is learned; None: it does not say."""
        return self.said[message] if self.said else None

    @property
    def left_out(self) -> list[int]:
        """Return the messages that say that they are not learned."""
        return [i for i in range(len(self.messages)) if self.learned(i) is False]


def read(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        NoJson: it is no JSON, or no UTF-8.
        CorruptData: it is too long or too deep, or no object.
    """
    if len(line) > MAX_LINE:
        raise CorruptData(f"a line has {len(line)} bytes, and {MAX_LINE} are the most")
    try:
        text = line.decode().removeprefix("\ufeff")
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(
            value, ensure_ascii=False, allow_nan=False
        ).encode()  # no half of a surrogate pair, no 1e999
    except (ValueError, RecursionError) as error:
        raise NoJson(f"no JSON: {str(error)[:200]}") from None
    if _depth(value) > MAX_DEPTH:
        raise CorruptData(f"lists and objects inside each other, more than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise CorruptData("it is no JSON object")
    return value


def chat(values: dict[str, Any], keys: Keys = NO_KEYS) -> Chat:
    """Return the chat of an object.

    Raises:
        CorruptData: it is none, has a key that is not known, its roles are out of order, or nothing
            in it is learned.
    """
    values = keys.kept(values)
    if ("messages" in values) == ("conversations" in values):
        raise CorruptData(
            "a chat has either messages (role, content) or conversations (from, value)"
        )
    keys.refuse_unknown(values, OF_A_CHAT, "the chat")
    require_learned(values, "the chat")
    found = _said(values, "messages" if "messages" in values else "conversations", keys)
    prompt = values.get("prompt")
    if prompt is not None and not any(one.get("content") == prompt for one in found):
        raise CorruptData(
            "its prompt is none of its messages, and would be lost: make it a message, or remove it"
        )
    return _ordered(_made(_with_system(values, found), _tools(values.get("tools"), keys)))


def pair(values: dict[str, Any], keys: Keys = NO_KEYS) -> tuple[Chat, Chat]:
    """Return the chosen and the rejected chat of an object, of which what both begin with is not
    learned.

    Raises:
        CorruptData: it is none, as `chat`, or both are the same.
    """
    values = keys.kept(values)
    missing = [name for name in ("chosen", "rejected") if name not in values]
    if missing:
        raise CorruptData(f"a pair has chosen and rejected; {' and '.join(missing)} is missing")
    keys.refuse_unknown(values, OF_A_PAIR, "the pair")
    require_learned(values, "the pair")
    begin: list[Message] = []
    if "messages" in values or "conversations" in values:
        begin = _said(values, "messages" if "messages" in values else "conversations", keys)
    elif isinstance(values.get("prompt"), str):
        begin = [{"role": "user", "content": values["prompt"]}]
    elif values.get("prompt") is not None:
        begin = _said(values, "prompt", keys)
    chosen, rejected = (
        _with_system(values, [*begin, *_answer(values, name, keys)])
        for name in ("chosen", "rejected")
    )
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if same is None:
        raise CorruptData(
            "chosen and rejected are the same"
            if chosen == rejected
            else "one goes on where one ends"
        )
    tools = _tools(values.get("tools"), keys)
    return _ordered(_made(chosen, tools, same)), _ordered(_made(rejected, tools, same))


def _made(found: list[Message], tools: list[Any] | None, begin: int = 0) -> Chat:
    """Return the chat of messages, which keep what they say of themselves to here: no template
    reads that.
    """
    said = tuple(learned(one, f"message {number}") for number, one in enumerate(found, 1))
    plain = [{key: value for key, value in one.items() if key not in FLAGS} for one in found]
    objects = [_with_objects(one, f"message {number}") for number, one in enumerate(plain, 1)]
    return Chat(plain, tools, begin, said, objects if objects != plain else None)


def _answer(values: dict[str, Any], name: str, keys: Keys) -> list[Message]:
    given = values[name]
    if isinstance(given, str):
        return [{"role": ASSISTANT, "content": given}]
    return (
        _said({name: [given]}, name, keys) if isinstance(given, dict) else _said(values, name, keys)
    )


def _said(values: dict[str, Any], name: str, keys: Keys) -> list[Message]:
    """Return the messages of a list in either form."""
    given = values[name]
    if not isinstance(given, list) or not given:
        raise CorruptData(f"{name} is no list of messages")
    return [
        _message(one, f"message {number} of {name}", keys) for number, one in enumerate(given, 1)
    ]


def _with_system(values: dict[str, Any], found: list[Message]) -> list[Message]:
    """Return messages behind what `system` beside them says."""
    system = values.get("system")
    if system in (None, ""):
        return found
    if not isinstance(system, str):
        raise CorruptData("system is no text")
    if found[0]["role"] != "system":
        return [{"role": "system", "content": system}, *found]
    if found[0].get("content") != system:
        raise CorruptData(
            "system says something else than the message of the system: one of them would be lost"
        )
    return found


def _message(given: Any, where: str, keys: Keys) -> Message:
    if not isinstance(given, dict):
        raise CorruptData(f"{where} is no object")
    given = keys.kept(given)
    made = {key: value for key, value in given.items() if value is not None}
    if "from" in given and "role" not in given:
        role = SPEAKERS.get(str(given["from"]))
        said = given.get("value")
        if role is None or not isinstance(said, str):
            speakers = ", ".join(SPEAKERS)
            raise CorruptData(
                f"{where} has no value that is a text, or its from is none of {speakers}"
            )
        if "content" in made or (role == "function_call" and "tool_calls" in made):
            raise CorruptData(
                f"{where} has a value, and beside it content or tool_calls: one of them would be"
                " lost"
            )
        made = {
            "role": role,
            "content": said,
            **{k: v for k, v in made.items() if k not in OF_A_TURN},
        }
        if role == "function_call":
            made |= {"role": ASSISTANT, "content": "", "tool_calls": _calls(said, where)}
    read = [key for key in made if keys.template_reads(key)]
    keys.refuse_unknown(made, (*OF_A_MESSAGE, *read), where)
    if not isinstance(made.get("role"), str) or made["role"] not in AFTER or not made["role"]:
        raise CorruptData(f"{where} has no role that is one of {', '.join(filter(None, AFTER))}")
    _refuse_lost(made, where, keys)
    return _with_content(made, where, keys)


def _refuse_lost(made: Message, where: str, keys: Keys) -> None:
    """Refuse what stands beside the content where the chat template does not read it."""
    for key, names in BESIDE_CONTENT.items():
        if made.get(key) and keys.template and not any(map(keys.template_reads, names)):
            fix = (
                f"data.chat_template=FILE that reads it, or data.ignored_keys=[{key}] to leave"
                " it out"
            )
            raise CorruptData(
                f"{where}: the chat template does not read its {key}, which would be lost; {fix}"
            )


def _with_content(made: Message, where: str, keys: Keys) -> Message:
    """Return a message in OpenAI's form whose content is text, or that calls a tool."""
    content = made.get("content")
    calls = made.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(one, dict) for one in calls)
    ):
        raise CorruptData(f"{where}: tool_calls is no list of objects")
    if content is None and made["role"] == ASSISTANT and (calls or made.get("function_call")):
        return made
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise CorruptData(
                f"{where}: a part of its content is {str(kind)[:40]!r}, and text alone is read"
            )
        if not isinstance(part.get("text") if isinstance(part, dict) else part, str):
            raise CorruptData(f"{where}: its content is no text")
        if isinstance(part, dict):
            keys.refuse_unknown(
                part, (*OF_A_PART, "cache_control"), f"a part of the content of {where}"
            )
            require_learned(keys.kept(part), f"a part of the content of {where}")
    return made


def with_arguments(given: Message, change: Callable[[str], Any]) -> Message:
    """Return a message with what `change` makes of each text that its calls of tools have as
    arguments.
    """
    made = dict(given)
    if given.get("tool_calls"):
        made["tool_calls"] = [_call(one, change) for one in given["tool_calls"]]
    if isinstance(given.get("function_call"), dict):
        made["function_call"] = _call(given["function_call"], change)
    return made


def _call(given: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """Return a call of a tool, or the function in it."""
    if isinstance(given.get("function"), dict):
        return {**given, "function": _call(given["function"], change)}
    text = given.get("arguments")
    return {**given, "arguments": change(text)} if isinstance(text, str) else given


def _with_objects(given: Message, where: str) -> Message:
    """Return a message whose calls of tools have objects as arguments.

    Raises:
        CorruptData: a text of arguments is not the JSON of an object.
    """

    def parsed(text: str) -> Any:
        try:
            value = json.loads(text or "{}", parse_constant=_refuse, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            rule = "the arguments of a call are an object, or the JSON text of one"
            raise CorruptData(f"{where}: {rule}, and these are {text[:60]!r}")
        return value

    return with_arguments(given, parsed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands in it twice")
    return made


def _calls(said: str, where: str) -> list[Any]:
    """Return the calls of ShareGPT's `function_call`: the text of an object with name and
    arguments, or of a list.
    """
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in calls
    ):
        raise CorruptData(f"{where}: a function_call is the JSON of a name and arguments")
    return [{"type": "function", "function": one} for one in calls]


def _tools(given: Any, keys: Keys) -> list[Any] | None:
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise CorruptData("tools is a text that is no JSON") from None
    if given in (None, "", []):
        return None
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise CorruptData("tools is no list of objects")
    if keys.template and "tools" not in keys.template:
        raise CorruptData(
            "the chat template does not read its tools, which would be lost: remove them"
        )
    return given


def _ordered(made: Chat) -> Chat:
    before = ""
    for number, one in enumerate(made.messages, 1):
        if one["role"] not in AFTER[before]:
            after = f"after {before}" if before else "at the beginning"
            wanted = " or ".join(AFTER[before])
            raise CorruptData(
                f"message {number} is of {one['role']}; {after} comes {wanted}: roles are out of"
                " order"
            )
        before = one["role"]
    if not made.answers:
        raise CorruptData("the assistant says nothing in it, so there is nothing to learn")
    if not made.turns:
        raise CorruptData(
            "every message of the assistant says that it is not learned: remove the line"
        )
    return made


def _depth(value: Any) -> int:
    """Return how many lists and objects stand inside each other."""
    depth = 0
    level = [value]
    while level:
        inner: list[Any] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level = inner
        depth = depth + 1
    return depth - 1


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is none")
