"""Constructors of table entries, most of them for one flag and one key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from mtrain.config.messages.keys import choices_of, field_of, when_of
from mtrain.config.resolve.conditional import Condition, condition
from mtrain.config.schema.base import SCHEMA_DEFAULT, Flag
from mtrain.recipes.megatron.arguments import Arguments, Draft, Entry, Values, whole

Absent = Callable[[Values], Any]
"""The value that leaving a flag out means, computed from other keys."""


def default_of(key: str) -> Any:
    """Return the schema's default of a key; None if the key is required."""
    field = field_of(key)
    value = field.get_default(call_default_factory=True) if field is not None else None
    return None if value is PydanticUndefined else value


def kind_of(key: str) -> type:
    """Return the type of a key's words: int, float or str."""
    return next((kind for kind in (float, int) if kind in types_of(key)), str)


def types_of(key: str) -> set[Any]:
    """Return the types that a key's value may have."""
    field = field_of(key)
    assert field is not None, key
    kinds: set[Any] = set()
    queue: list[Any] = [field.annotation]
    while queue:
        annotation = queue.pop()
        kinds.add(annotation)
        if get_origin(annotation) not in (tuple, list, dict):
            queue += get_args(annotation)
    return kinds


def spelled(value: Any) -> str:
    """Return a value as a word of a command line; integral floats become integers."""
    # below it, floats hold every integer exactly
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def one(
    flag: str,
    key: str,
    absent: Any = None,
    *,
    words: Mapping[str, str] | None = None,
    none: tuple[Any, ...] = (),
    always: bool = False,
    also: Sequence[str] = (),
) -> Entry:
    """Return a flag with one value.

    `absent` is the meaning of leaving it out: a value, or a function of other keys. `words` are the
    flag's own words for ours, `none` the values that stand for null, `also` other spellings of the
    flag. With `always` it is written even if leaving it out means the same.
    """
    means: Absent = absent if callable(absent) else lambda values: absent
    kind = kind_of(key)
    # read from the flag's words to ours, and written the other way
    translations = dict(words or {})

    def read(arguments: Arguments, draft: Draft) -> Draft:
        # an older spelling counts where the usual one is missing
        for name in (flag, *also):
            value = arguments.converted(name, whole if kind is int else kind)
            choices = choices_of(key)
            if value is None:
                continue
            value = translations.get(value, value) if kind is str else value
            if choices and value not in choices:
                arguments.refuse(name, "not supported", f"{key} is one of {', '.join(choices)}")
                continue
            return {key: None if value in none else value}
        value = means(draft)
        return {} if value is None and always else {key: value}

    def write(values: Values) -> list[str]:
        value = values.get(key)
        # null means something else than leaving the flag out
        if value is None and none and key in values and means(values) is not None:
            return [flag, spelled(none[0])]
        if value is None or (not always and value == means(values)):
            return []
        back: dict[Any, str] = {ours: word for word, ours in translations.items()}
        return [flag, back.get(value, str(value)) if kind is str else spelled(value)]

    return Entry((flag, *also), (key,), read, write)


def words_of(flag: str, key: str) -> Callable[[Values], Sequence[str]]:
    """Return the writer of a flag with the value of a key; a key that is null has no words."""

    def write(values: Values) -> list[str]:
        value = values.get(key)
        return [] if value is None else [flag, spelled(value)]

    return write


def section(flag: str, key: str, inner: str) -> Entry:
    """Return a switch that adds a section, which always has the key `inner`."""

    def read(arguments: Arguments, draft: Draft) -> Draft:
        # an empty mapping marks the section as present: its keys have entries of their own
        return {key: {} if arguments.has(flag) else None}

    def write(values: Values) -> list[str]:
        return [flag] if f"{key}.{inner}" in values else []

    return Entry((flag,), (key,), read, write, switches=(flag,))


def on(flag: str, key: str) -> Entry:
    """Return a switch that makes a key true."""
    return _switch(flag, key, True)


def _switch(flag: str, key: str, value: bool) -> Entry:
    def read(arguments: Arguments, draft: Draft) -> Draft:
        return {key: value if arguments.has(flag) else not value}

    def write(values: Values) -> list[str]:
        return [flag] if values.get(key) is value else []

    return Entry((flag,), (key,), read, write, switches=(flag,))


def conditional(
    flag: str, key: str, active: Callable[[Values], bool], absent: Any, why: str
) -> Entry:
    """Return a flag with one value, read only if `active` holds; otherwise null."""
    plain = one(flag, key, absent)

    def read(arguments: Arguments, draft: Draft) -> Draft:
        if active(draft):
            return plain.read(arguments, draft)
        # consulted, so that it does not count as an unknown flag
        arguments.words(flag)
        arguments.refuse(flag, "no effect", why)
        return {key: None}

    return Entry(
        (flag,),
        (key,),
        read,
        lambda values: plain.write(values) if key in values and active(values) else [],
    )


def conditional_switch(flag: str, key: str, active: Callable[[Values], bool], why: str) -> Entry:
    """Return a switch that makes a key true, and is read only if `active` holds for other keys."""
    plain = on(flag, key)

    def read(arguments: Arguments, draft: Draft) -> Draft:
        if active(draft):
            return plain.read(arguments, draft)
        arguments.has(flag)
        arguments.refuse(flag, "no effect", why)
        return {key: False}

    return Entry((flag,), (key,), read, plain.write, switches=(flag,))


def of_schema(key: str, flag: Flag) -> Entry:
    """Return the entry of a key whose schema names its flag."""
    absent = default_of(key) if flag.absent is SCHEMA_DEFAULT else flag.absent
    if bool in types_of(key):
        plain = _switch(flag.name, key, not flag.off)
    else:
        field = field_of(key)
        always = flag.always or (field is not None and field.is_required())
        plain = one(flag.name, key, absent, none=flag.none, always=always, also=flag.also)
    return _where(condition(when_of(key)), plain) if when_of(key) else plain


def _where(needed: Condition, plain: Entry) -> Entry:
    """Return an entry that is read and written only if a condition on other keys holds."""
    (key,) = plain.keys

    def read(arguments: Arguments, draft: Draft) -> Draft:
        holds = needed.holds(draft.get)
        silent = not any(flag in arguments.flags or flag in arguments.maybe for flag in plain.flags)
        if (
            arguments.doubts
            and silent
            and plain.read(Arguments(()), draft).get(key) == default_of(key)
        ):
            arguments.doubts = {}  # the value is the same whether or not the condition holds
        if holds:
            return plain.read(arguments, draft)
        for flag in plain.flags:
            arguments.has(flag)
            arguments.refuse(flag, "no effect", f"says nothing without {needed}")
        return {key: default_of(key)}

    def write(values: Values) -> Sequence[str]:
        return plain.write(values) if key in values and needed.holds(values.get) else []

    return Entry(plain.flags, plain.keys, read, write, switches=plain.switches)


def numbers(flag: str, key: str) -> Entry:
    """Return a flag with several integers; without it, the key is null."""

    def read(arguments: Arguments, draft: Draft) -> Draft:
        words = arguments.words(flag)
        if words is None:
            return {key: None}
        # no size has as many digits, and Python is slow with thousands of them
        if not words or not all(word.isdigit() and len(word) < 10 for word in words):
            arguments.refuse(flag, "unreadable", "takes whole numbers")
            return {key: None}
        return {key: [int(word) for word in words]}

    def write(values: Values) -> list[str]:
        return [flag, *map(str, values[key])] if values.get(key) else []

    return Entry((flag,), (key,), read, write)


def always(key: str, value: Any) -> Entry:
    """Return a key without a flag, because Megatron-LM always behaves this way."""
    return Entry((), (key,), lambda arguments, draft: {key: value}, lambda values: [])


def list_choices(key: str) -> list[str]:
    """Return the words that a key's list may hold."""
    field = field_of(key)
    queue = [field.annotation if field is not None else None]
    out = list[str]()
    while queue:
        annotation = queue.pop()
        if get_origin(annotation) is Literal:
            out += get_args(annotation)
        else:
            queue += get_args(annotation)
    return out
