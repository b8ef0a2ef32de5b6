"""The words of a training command as flags, the entries that read and write them, and the
constructors of entries, most of them for one flag and one key.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic_core import PydanticUndefined

from mtrain.config.messages.keys import choices_of, field_of, when_of
from mtrain.config.resolve.conditional import Condition, condition
from mtrain.config.schema.base import SCHEMA_DEFAULT, Flag
from mtrain.recipes.shell.gaps import Unread, Word, shown

Why = Literal["unknown", "not supported", "derived here", "no effect", "unreadable", "secret"]
T = TypeVar("T")


@dataclass(frozen=True)
class Unplaced:
    """A flag that has no key here, or whose value could not be imported."""

    flag: str
    value: str
    why: Why
    text: str
    """A sentence."""


class Arguments:
    """The flags of a command line, which remembers every flag that was consulted."""

    def __init__(self, words: Iterable[Word], switches: Container[str] = ()) -> None:
        """Split the words into flags; `switches` are the flags that take no value."""
        self.flags: dict[str, list[Word]] = {}
        self.stray: list[Word] = []
        self.unplaced: dict[str, Unplaced] = {}
        self.consulted: set[str] = set()
        self.notes: list[str] = []
        """Differences of an absent flag that mtrain cannot express."""
        self.loose: list[Unread] = []
        """Words that may hold any flag, or none."""
        self.maybe: dict[str, Unread] = {}
        """Flags that such a word may hold."""
        self.doubts: dict[str, str] = {}
        """Consulted flags with unknown values -> the reason, for the entry being read."""
        self._uncertain: dict[str, Unread] = {}
        name = ""
        current = self.stray
        for word in words:
            start = word if isinstance(word, str) else word.start
            # `--flag$X` may be any flag: only up to an `=` is its name known
            if (
                start.startswith("--")
                and len(start) > 2
                and (isinstance(word, str) or "=" in start)
            ):
                name, equals, value = start.partition("=")
                current = []
                self.flags[name] = current
                if isinstance(word, Unread):
                    current.append(Unread((value, *word.pieces[1:]) if value else word.pieces[1:]))
                elif equals:
                    current.append(value)
            elif isinstance(word, Unread) and (
                start.startswith("--") or (word.whole and self._full(name, switches))
            ):
                self._set_loose(word, name)
            else:
                current.append(word)

    def _full(self, name: str, switches: Container[str]) -> bool:
        """Return whether a word after a flag is not its value: the flag has one, or takes none."""
        return not name or bool(self.flags[name]) or name in switches

    def _set_loose(self, word: Unread, name: str) -> None:
        words = [inner for gap in word.gaps for inner in (gap.words or ())]
        if any(gap.words is None for gap in word.gaps) or any(
            isinstance(w, Unread) and w.whole for w in words
        ):
            self.loose.append(word)
            if name and not word.absent:
                # it may also be a further value of the flag before it
                self._uncertain.setdefault(name, word)
        for inner in words:
            text = inner if isinstance(inner, str) else inner.start
            if text.startswith("--"):
                self.maybe.setdefault(text.partition("=")[0], word)

    def refuse(self, flag: str, why: Why, text: str) -> None:
        """Note that `flag` was not imported; the first reason counts."""
        # the keys that the entry sets depend on a value that nobody knows
        if why == "unreadable" and (flag in self.flags or flag in self.maybe):
            self.doubts.setdefault(flag, f"{flag} {text}")
        if flag in self.flags and flag not in self.unplaced:
            self.unplaced[flag] = Unplaced(flag, " ".join(map(shown, self.flags[flag])), why, text)

    def consult(self, flag: str) -> list[Word] | None:
        """Return the words of a flag, and note a doubt if it may have others."""
        self.consulted.add(flag)
        word = self.maybe.get(flag)
        if word is not None:
            self.doubts.setdefault(flag, f"{flag} may be given: {word.why}")
        return self.flags.get(flag)

    def has(self, flag: str) -> bool:
        """Return whether the flag is present; words after a switch are not its value."""
        return self.consult(flag) is not None

    def words(self, flag: str) -> list[str] | None:
        """Return all values of a flag; None if the flag is missing or a value is unknown."""
        given = self.consult(flag)
        if given is None:
            return None
        uncertain = [self._uncertain[flag]] if flag in self._uncertain else []
        unread = [word for word in (*given, *uncertain) if isinstance(word, Unread)]
        if unread:
            self.refuse(flag, "unreadable", unread[0].why)
            return None
        return [word for word in given if isinstance(word, str)]

    def word(self, flag: str) -> str | None:
        """Return the one value of a flag; None if the flag is missing or cannot be imported."""
        given = self.consult(flag)
        if given is None:
            return None
        if len(given) != 1:
            self.refuse(flag, "unreadable", f"takes one value, and has {len(given)}")
            return None
        if isinstance(given[0], Unread):
            self.refuse(flag, "unreadable", given[0].why)
            return None
        return given[0]

    def converted(self, flag: str, convert: Callable[[str], T]) -> T | None:
        """Return the one value of a flag, converted; None if that is impossible."""
        text = self.word(flag)
        if text is None:
            return None
        try:
            return convert(text)
        # `int` of an infinite float overflows
        except (ValueError, OverflowError):
            self.refuse(
                flag, "unreadable", f"{text[:40]!r} is not a {_NAMES.get(convert, 'valid value')}"
            )
            return None


def whole(text: str) -> int:
    """Return an integer, also from `1000.0` or `1e3`."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)


_NAMES: dict[Any, str] = {int: "whole number", whole: "whole number", float: "number"}

Draft = dict[str, Any]
"""Dotted key -> value, of the flags that were read so far."""
Values = Mapping[str, Any]
"""Dotted key -> value of a whole configuration, without the keys of null sections."""


@dataclass(frozen=True)
class Entry:
    """Flags and the keys that they set, with the functions that read and write them."""

    flags: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[Arguments, Draft], Draft]
    """Returns the keys' values; an omitted key keeps its default here."""
    write: Callable[[Values], Sequence[str]]
    """Returns the words of the command line; none if leaving the flag out means the same."""
    decides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag -> the keys that are unknown if its value is; all keys if not listed."""
    switches: tuple[str, ...] = ()
    """The flags that take no value."""


class _DraftReader(dict[str, Any]):
    """A draft that reads the entry of a key on its first use, so that their order does not matter.

    A key is left open if its entry consulted an unknown flag or key.
    """

    def __init__(
        self, arguments: Arguments, entries: Iterable[Entry], known: Draft, left: dict[str, str]
    ) -> None:
        super().__init__(known)
        self._arguments = arguments
        self._waiting = {key: entry for entry in entries for key in entry.keys}
        self._left = left

    def require(self, key: str) -> None:
        """Read the entry of a key; its own keys are missing meanwhile."""
        entry = self._waiting.get(key)
        if entry is not None:
            self.read(entry)
        if key in self._left:
            self._arguments.doubts.setdefault(key, self._left[key])

    def read(self, entry: Entry) -> None:
        for key in entry.keys:
            # first of all: an entry that consulted its own key would be read without end
            self._waiting.pop(key, None)
        # entries are read within others; each collects its own doubts
        before = self._arguments.doubts
        self._arguments.doubts = {}
        self.update(entry.read(self._arguments, self))
        for name, why in self._arguments.doubts.items():
            for key in entry.decides.get(name, entry.keys):
                self._left.setdefault(key, why)
        self._arguments.doubts = before

    def __getitem__(self, key: str) -> Any:
        self.require(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.require(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.require(str(key))
        return super().__contains__(key)


def read_all(
    arguments: Arguments, entries: Sequence[Entry], known: Draft, left: dict[str, str] | None = None
) -> Draft:
    """Return the keys that the flags set, by all `entries`, in addition to `known` keys.

    `left` are unknown keys, with the reason; this adds the keys that depend on them, or on unknown
    flags.
    """
    reader = _DraftReader(arguments, entries, known, {} if left is None else left)
    for entry in entries:
        for key in entry.keys:
            reader.require(key)
        if not entry.keys:
            reader.read(entry)
    arguments.doubts = {}
    return dict(reader)


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

    `absent` is the meaning of leaving it out: a value, or a function of other keys. `words` maps
    the flag's words to mtrain's, `none` lists the values that mean null, `also` other spellings of
    the flag. With `always` it is written even if leaving it out means the same.
    """
    means: Absent = absent if callable(absent) else lambda values: absent
    kind = kind_of(key)
    # read from the flag's words to mtrain's, and written the other way
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
