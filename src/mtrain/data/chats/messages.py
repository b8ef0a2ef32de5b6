"""Messages of a chat, parsed from a line of a JSON Lines file.

Two formats are read: {"messages": [{"role": ..., "content": ...}, ...]} of OpenAI's API, with
`tool_calls` and tools; and {"conversations": [{"from": "human", "value": ...}, ...]} of ShareGPT.
Either may have `tools`, a list or the JSON text of one, and `system`, a text. Pairs have `chosen`
and `rejected`, which begin alike or follow a `prompt`; labelled answers have a `completion` and a
`label`: https://huggingface.co/docs/trl/dataset_formats. Scored answers have `answers`, or
`completions`, and `scores`. Prompts for rollouts have no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite
from typing import Any

from mtrain.data.chats.template import REASONING
from mtrain.data.records import FLAGS, Keys, is_learning_flag, learned, require_learned
from mtrain.errors import CorruptData

MAX_LINE = 64 << 20
# Nested lists and objects; the JSON writer recurses into each
MAX_DEPTH = 200
Message = dict[str, Any]
# `from` of ShareGPT -> role
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
    "system": "system",
}
ASSISTANT = "assistant"
# Role -> roles that may follow it
AFTER: dict[str, tuple[str, ...]] = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": (ASSISTANT,),
    ASSISTANT: ("user", "tool", "function"),
    "tool": ("tool", "function", ASSISTANT),
    "function": ("tool", "function", ASSISTANT),
}
OF_A_CHAT = ("messages", "conversations", "tools", "system", "prompt")
OF_A_PAIR = (*OF_A_CHAT, "chosen", "rejected", "margin")
OF_AN_ANSWER = (*OF_A_CHAT, "completion", "label")
OF_A_RANKING = (*OF_A_CHAT, "answers", "completions", "scores")
OF_A_MESSAGE = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    *REASONING,
    "refusal",
)
OF_A_TURN = ("from", "value")
OF_A_PART = ("type", "text")
# Key of a message besides its content -> the keys under which a template may read its value; a
# template that reads none of them would lose it.
BESIDES_CONTENT = {
    "tool_calls": ("tool_calls",),
    "function_call": ("function_call",),
    "refusal": ("refusal",),
    **dict.fromkeys(REASONING, REASONING),
}
NO_KEYS = Keys()


class NotJson(CorruptData):
    """A line that is not JSON or not UTF-8: damage of the file, not a wrong chat."""


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form that a chat template reads."""

    messages: list[Message]
    tools: list[Any] | None = None
    begin: int = 0
    """The first message that may be learned; the ones before it are common to a pair."""
    flags: tuple[bool | None, ...] = ()
    """Loss flags, one for each message: True to learn it, False to skip it, None without a flag."""
    objects: list[Message] | None = None
    """The messages with their tool arguments parsed from JSON text; None if none are such text."""
    margin: float = 0.0
    """The margin of a pair, with its chosen chat."""

    @property
    def turns(self) -> list[int]:
        """Return the indices of the assistant's messages that are learned."""
        return [i for i in self.answers if self.learned(i) is not False]

    @property
    def answers(self) -> list[int]:
        """Return the indices of the assistant's messages, without the common start of a pair."""
        return [
            i for i, one in enumerate(self.messages) if i >= self.begin and one["role"] == ASSISTANT
        ]

    def learned(self, message: int) -> bool | None:
        """Return whether a message's own flags have it learned; None without a flag."""
        return self.flags[message] if self.flags else None

    @property
    def left_out(self) -> list[int]:
        """Return the indices of the messages whose own flags exclude them from learning."""
        return [i for i in range(len(self.messages)) if self.learned(i) is False]


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        NotJson: the line is not JSON or not UTF-8.
        CorruptData: the line is too long, nested too deeply, or not an object.
    """
    if len(line) > MAX_LINE:
        raise CorruptData(f"a line has {len(line)} bytes; at most {MAX_LINE} are read")
    try:
        # editors on Windows begin a file with a byte order mark
        text = line.decode().removeprefix("\ufeff")
        value = json.loads(text, parse_constant=_refuse)
        # writing it again refuses a lone surrogate and 1e999
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise NotJson(f"not JSON: {str(error)[:200]}") from None
    if _depth(value) > MAX_DEPTH:
        raise CorruptData(f"lists and objects are nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        raise CorruptData("it is not a JSON object")
    return value


def parse_chat(values: dict[str, Any], keys: Keys = NO_KEYS) -> Chat:
    """Return the chat of an object.

    Raises:
        CorruptData: the object is not a chat, has an unknown key or roles out of order, or nothing
            in it is learned.
    """
    values = keys.kept(values)
    if ("messages" in values) == ("conversations" in values):
        raise CorruptData(
            "a chat has either messages (role, content) or conversations (from, value)"
        )
    keys.refuse_unknown(values, OF_A_CHAT, "the chat")
    require_learned(values, "the chat")
    messages = _messages(values, "messages" if "messages" in values else "conversations", keys)
    prompt = values.get("prompt")
    if prompt is not None and not any(one.get("content") == prompt for one in messages):
        raise CorruptData(
            "its prompt is not one of its messages, and would be lost: make it a message, or remove"
            " it"
        )
    return _ordered(_made(_with_system(values, messages), _tools(values.get("tools"), keys)))


def parse_prompt(values: dict[str, Any], keys: Keys = NO_KEYS) -> Chat:
    """Return the messages of an object up to where the model answers; its other keys are columns,
    which rewards read.

    Raises:
        CorruptData: it has no prompt, or its last message is not one that a model answers.
    """
    values = keys.kept(values)
    given = [name for name in ("prompt", "messages", "conversations") if name in values]
    if len(given) != 1:
        raise CorruptData("a prompt is one key: prompt (a text or messages), or messages")
    if isinstance(values[given[0]], str):
        messages: list[Message] = [{"role": "user", "content": values[given[0]]}]
    else:
        messages = _messages(values, given[0], keys)
    made = _made(_with_system(values, messages), _tools(values.get("tools"), keys))
    last = made.messages[-1]["role"]
    if last not in AFTER[ASSISTANT]:
        raise CorruptData(f"the last message is of {last}, and the model answers a user or a tool")
    return _in_order(made)


def parse_pair(values: dict[str, Any], keys: Keys = NO_KEYS) -> tuple[Chat, Chat]:
    """Return the chosen and the rejected chat of an object; their common start is not learned.

    Raises:
        CorruptData: the object is not a pair, one of its chats is wrong, an answer is empty, or
            both are the same.
    """
    values = keys.kept(values)
    missing = [name for name in ("chosen", "rejected") if name not in values]
    if missing:
        raise CorruptData(f"a pair has chosen and rejected; {' and '.join(missing)} is missing")
    keys.refuse_unknown(values, OF_A_PAIR, "the pair")
    require_learned(values, "the pair")
    begin = _start(values, keys)
    chosen, rejected = (
        _with_system(values, [*begin, *_answer(values, name, keys)])
        for name in ("chosen", "rejected")
    )
    # what both chats begin with has the same probability in both, and teaches no preference
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), None)
    if common is None and chosen == rejected:
        raise CorruptData("chosen and rejected are the same")
    if common is None:
        raise CorruptData("one of chosen and rejected is the beginning of the other")
    for name, answer in (("chosen", chosen[common:]), ("rejected", rejected[common:])):
        if not any(map(_says_something, answer)):
            raise CorruptData(f"its {name} answer is empty: give it a text, or remove the line")
    tools = _tools(values.get("tools"), keys)
    better, worse = (_ordered(_made(chat, tools, common)) for chat in (chosen, rejected))
    margin = values.get("margin")
    if margin is None:
        return better, worse
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
        raise CorruptData(f"its margin is {str(margin)[:40]!r}, and not a number")
    return replace(better, margin=float(margin)), worse


def parse_labelled(values: dict[str, Any], keys: Keys = NO_KEYS) -> tuple[Chat, bool]:
    """Return the chat of an object with one answer, whose prompt is not learned, and whether the
    answer is desirable.

    Raises:
        CorruptData: the object is not a labelled answer, its chat is wrong, or its answer is empty.
    """
    values = keys.kept(values)
    missing = [name for name in ("completion", "label") if name not in values]
    if missing:
        raise CorruptData(
            f"a labelled answer has completion and label; {' and '.join(missing)} is missing"
        )
    keys.refuse_unknown(values, OF_AN_ANSWER, "the answer")
    require_learned(values, "the answer")
    if not is_learning_flag(values["label"]):
        raise CorruptData(f"its label is {str(values['label'])[:40]!r}, and not true or false")
    begin = _start(values, keys)
    if not begin:
        raise CorruptData("a labelled answer follows a prompt, which is missing")
    answer = _answer(values, "completion", keys)
    if not any(map(_says_something, answer)):
        raise CorruptData("its completion is empty: give it a text, or remove the line")
    whole = _with_system(values, [*begin, *answer])
    chat = _made(whole, _tools(values.get("tools"), keys), len(whole) - len(answer))
    return _ordered(chat), bool(values["label"])


def parse_ranking(values: dict[str, Any], keys: Keys = NO_KEYS) -> list[tuple[Chat, Chat]]:
    """Return the pairs of an object with scored answers: each two with different scores, of which
    the higher one is chosen, from the best answer down; none if all scores are equal.

    Raises:
        CorruptData: scores are no numbers, or as many as the answers; or a pair is wrong.
    """
    values = keys.kept(values)
    names = [name for name in ("answers", "completions") if name in values]
    if len(names) != 1 or "scores" not in values:
        raise CorruptData("scored answers have either answers or completions, and scores")
    keys.refuse_unknown(values, OF_A_RANKING, "the scored answers")
    answers = values[names[0]]
    scores = values["scores"]
    if not (isinstance(answers, list) and isinstance(scores, list) and len(answers) == len(scores)):
        raise CorruptData(f"its {names[0]} and scores are not two lists of one length")
    for number, score in enumerate(scores, 1):
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise CorruptData(f"score {number} is {str(score)[:40]!r}, and not a number")
    begin = {key: value for key, value in values.items() if key not in (names[0], "scores")}
    # Answers of one score keep the order of the file.
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    pairs = []
    for better, worse in combinations(order, 2):
        if scores[better] == scores[worse]:
            continue
        apart = float(scores[better] - scores[worse])
        pair = {**begin, "chosen": answers[better], "rejected": answers[worse], "margin": apart}
        try:
            pairs.append(parse_pair(pair, keys))
        except CorruptData as error:
            which = f"answer {better + 1} as chosen, {worse + 1} as rejected"
            raise CorruptData(f"{which}: {error}") from None
    return pairs


def _start(values: dict[str, Any], keys: Keys) -> list[Message]:
    """Return the messages before an answer; none if the answer has them itself."""
    if "messages" in values or "conversations" in values:
        return _messages(values, "messages" if "messages" in values else "conversations", keys)
    if isinstance(values.get("prompt"), str):
        return [{"role": "user", "content": values["prompt"]}]
    return [] if values.get("prompt") is None else _messages(values, "prompt", keys)


def _says_something(message: Message) -> bool:
    """Return whether a message has a text that is not blank, or a call."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    calls = message.get("tool_calls") or message.get("function_call")
    return bool(calls) or any(text and text.strip() for text in texts)


def _made(messages: list[Message], tools: list[Any] | None, begin: int = 0) -> Chat:
    """Return the chat of messages, without their learning flags, which no template reads."""
    flags = tuple(learned(one, f"message {number}") for number, one in enumerate(messages, 1))
    plain = [{key: value for key, value in one.items() if key not in FLAGS} for one in messages]
    objects = [_with_objects(one, f"message {number}") for number, one in enumerate(plain, 1)]
    return Chat(plain, tools, begin, flags, objects if objects != plain else None)


def _answer(values: dict[str, Any], name: str, keys: Keys) -> list[Message]:
    given = values[name]
    if isinstance(given, str):
        return [{"role": ASSISTANT, "content": given}]
    if isinstance(given, dict):
        return _messages({name: [given]}, name, keys)
    return _messages(values, name, keys)


def _messages(values: dict[str, Any], name: str, keys: Keys) -> list[Message]:
    """Return the messages of a list in either format."""
    given = values[name]
    if not isinstance(given, list) or not given:
        raise CorruptData(f"{name} is not a list of messages")
    return [
        _message(one, f"message {number} of {name}", keys) for number, one in enumerate(given, 1)
    ]


def _with_system(values: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages with the text of the `system` key in front."""
    system = values.get("system")
    if system in (None, ""):
        return messages
    if not isinstance(system, str):
        raise CorruptData("system is not a text")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise CorruptData("system and the message of the system differ: one of them would be lost")
    return messages


def _message(given: Any, where: str, keys: Keys) -> Message:
    if not isinstance(given, dict):
        raise CorruptData(f"{where} is not an object")
    given = keys.kept(given)
    made = {key: value for key, value in given.items() if value is not None}
    if "from" in given and "role" not in given:
        role = SPEAKERS.get(str(given["from"]))
        text = given.get("value")
        if role is None or not isinstance(text, str):
            speakers = ", ".join(SPEAKERS)
            raise CorruptData(
                f"{where} has no value that is a text, or its from is not one of {speakers}"
            )
        if "content" in made or (role == "function_call" and "tool_calls" in made):
            raise CorruptData(
                f"{where} has a value and also content or tool_calls: one of them would be lost"
            )
        others = {key: value for key, value in made.items() if key not in OF_A_TURN}
        made = {"role": role, "content": text} | others
        if role == "function_call":
            made |= {"role": ASSISTANT, "content": "", "tool_calls": _calls(text, where)}
    read = [key for key in made if keys.template_reads(key)]
    keys.refuse_unknown(made, (*OF_A_MESSAGE, *read), where)
    if not isinstance(made.get("role"), str) or made["role"] not in AFTER or not made["role"]:
        raise CorruptData(f"the role of {where} is not one of {', '.join(filter(None, AFTER))}")
    _refuse_lost(made, where, keys)
    return _with_content(made, where, keys)


def _refuse_lost(made: Message, where: str, keys: Keys) -> None:
    """Refuse a key besides the content that the chat template does not read."""
    for key, names in BESIDES_CONTENT.items():
        if made.get(key) and keys.template and not any(map(keys.template_reads, names)):
            fix = (
                f"data.chat_template=FILE that reads it, or data.ignored_keys=[{key}] to leave"
                " it out"
            )
            raise CorruptData(
                f"{where}: the chat template does not read its {key}, which would be lost; {fix}"
            )


def _with_content(made: Message, where: str, keys: Keys) -> Message:
    """Return a message in OpenAI's format; raise CorruptData unless it is text or a tool call."""
    content = made.get("content")
    calls = made.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(one, dict) for one in calls)
    ):
        raise CorruptData(f"{where}: tool_calls is not a list of objects")
    if content is None and made["role"] == ASSISTANT and (calls or made.get("function_call")):
        return made
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise CorruptData(
                f"{where}: a part of its content is {str(kind)[:40]!r}, and only text is read"
            )
        if not isinstance(part.get("text") if isinstance(part, dict) else part, str):
            raise CorruptData(f"{where}: its content is not a text")
        if isinstance(part, dict):
            keys.refuse_unknown(
                part, (*OF_A_PART, "cache_control"), f"a part of the content of {where}"
            )
            require_learned(keys.kept(part), f"a part of the content of {where}")
    return made


def with_arguments(given: Message, change: Callable[[str], Any]) -> Message:
    """Return a message whose tool calls have `change(text)` for each argument that is a text."""
    made = dict(given)
    if given.get("tool_calls"):
        made["tool_calls"] = [_call(one, change) for one in given["tool_calls"]]
    if isinstance(given.get("function_call"), dict):
        made["function_call"] = _call(given["function_call"], change)
    return made


def _call(given: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """Return a tool call, or the function inside one, with its arguments changed."""
    if isinstance(given.get("function"), dict):
        return {**given, "function": _call(given["function"], change)}
    text = given.get("arguments")
    return {**given, "arguments": change(text)} if isinstance(text, str) else given


def _with_objects(given: Message, where: str) -> Message:
    """Return a message whose tool calls have objects as arguments.

    Raises:
        CorruptData: the text of an argument is not the JSON of an object.
    """

    def parsed(text: str) -> Any:
        try:
            value = json.loads(text or "{}", parse_constant=_refuse, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise CorruptData(
                f"{where}: the arguments of a call are an object, or the JSON text of one, and"
                f" these are {text[:60]!r}"
            )
        return value

    return with_arguments(given, parsed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads would keep the last of two values, and the other would be lost
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("it has a key twice")
    return made


def _calls(text: str, where: str) -> list[Any]:
    """Return the calls in ShareGPT's `function_call`: JSON of a name and arguments, or a list."""
    try:
        value = json.loads(text)
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
            raise CorruptData("tools is a text that is not JSON") from None
    if given in (None, "", []):
        return None
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise CorruptData("tools is not a list of objects")
    if keys.template and "tools" not in keys.template:
        raise CorruptData(
            "the chat template does not read its tools, which would be lost: remove them"
        )
    return given


def _in_order(made: Chat) -> Chat:
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
    return made


def _ordered(made: Chat) -> Chat:
    _in_order(made)
    if not made.answers:
        raise CorruptData("the assistant says nothing in it, so there is nothing to learn")
    if not made.turns:
        raise CorruptData(
            "every message of the assistant says that it is not learned: remove the line"
        )
    return made


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested."""
    # level by level: a recursion would fail at the depth that it is to find
    depth = 0
    level = [value]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner
        depth += 1
    return depth - 1


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
