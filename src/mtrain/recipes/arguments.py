"""The words behind a training script as flags with their values, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from mtrain.recipes.expansion import UNKNOWN, shown

Why = Literal["unknown", "not supported", "derived here", "no effect", "unreadable", "secret"]
T = TypeVar("T")


@dataclass(frozen=True)
class Unplaced:
    """A flag that has no key here, or whose value could not be taken over."""

    flag: str
    value: str
    why: Why
    text: str
    """A sentence."""


class Arguments:
    """Flags of a command line; every question asked of a flag counts as reading it."""

    def __init__(self, words: Iterable[str]) -> None:
        self.flags: dict[str, list[str]] = {}
        self.stray: list[str] = []
        self.unplaced: dict[str, Unplaced] = {}
        self.asked: set[str] = set()
        self.notes: list[str] = []
        """What leaving a flag out means there and cannot mean here."""
        current: list[str] = self.stray
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word.partition("=")
                current = self.flags[name] = [value] if equals else []
            else:
                current.append(word)

    def refuse(self, flag: str, why: Why, text: str) -> None:
        """Notes that `flag` was not taken over; the first reason holds."""
        if flag in self.flags and flag not in self.unplaced:
            self.unplaced[flag] = Unplaced(flag, shown(" ".join(self.flags[flag])), why, text)

    def has(self, flag: str) -> bool:
        """Whether the flag is there; what follows a switch is no value of it."""
        self.asked.add(flag)
        return flag in self.flags

    def words(self, flag: str) -> list[str] | None:
        """All values of a flag; None where it is not there, or where a value is unknown."""
        self.asked.add(flag)
        found = self.flags.get(flag)
        if found is None:
            return None
        missing = [what for word in found for what in UNKNOWN.findall(word)]
        if missing:
            said = "is the output of a command" if missing[0].startswith("$(") else "the script does not set"
            self.refuse(flag, "unreadable", f"needs {missing[0]}, which {said}")
            return None
        return found

    def word(self, flag: str) -> str | None:
        """The one value of a flag; None where it is not there or cannot be taken over.

        Variables behind it that are not known are more flags, or nothing.
        """
        given = self.flags.get(flag, [])
        if len(given) > 1 and all(UNKNOWN.fullmatch(word) for word in given[1:]):
            self.flags[flag] = given[:1]
        found = self.words(flag)
        if found is None:
            return None
        if len(found) != 1:
            self.refuse(flag, "unreadable", f"takes one value, and has {len(found)}")
            return None
        return found[0]

    def as_(self, flag: str, convert: Callable[[str], T]) -> T | None:
        """The one value of a flag, converted; None where it is not there or cannot be."""
        text = self.word(flag)
        if text is None:
            return None
        try:
            return convert(text)
        except (ValueError, OverflowError):
            self.refuse(flag, "unreadable", f"{text[:40]!r} is no {_NAMES.get(convert, 'value of it')}")
            return None


def whole(text: str) -> int:
    """A whole number, also as `1000.0` or `1e3`."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if number != int(number):
            raise
        return int(number)


_NAMES: dict[Any, str] = {int: "whole number", whole: "whole number", float: "number"}

Draft = dict[str, Any]
"""Dotted key -> value, of the flags that are read so far."""
Values = Mapping[str, Any]
"""Dotted key -> value of a whole configuration; keys of a section that is null are not there."""


@dataclass(frozen=True)
class Entry:
    """Some flags and the keys they stand for; read and written by one pair of functions."""

    flags: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[Arguments, Draft], Draft]
    """The keys' values; a key that is left out keeps what it is without the flag here."""
    write: Callable[[Values], Sequence[str]]
    """The words of the command line; none where absence says the same."""


class _Reading(dict[str, Any]):
    """Keys as they are read: whoever asks for a key has its entry read first, so that their order does not matter."""

    def __init__(self, a: Arguments, entries: Iterable[Entry], known: Draft) -> None:
        super().__init__(known)
        self._arguments = a
        self._waiting = {key: entry for entry in entries for key in entry.keys}

    def ask(self, key: str) -> None:
        """Reads the entry of a key; while it is read, its own keys are not there yet."""
        entry = self._waiting.get(key)
        if entry is not None:
            self.read(entry)

    def read(self, entry: Entry) -> None:
        for key in entry.keys:
            self._waiting.pop(key, None)
        self.update(entry.read(self._arguments, self))

    def __getitem__(self, key: str) -> Any:
        self.ask(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.ask(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.ask(str(key))
        return super().__contains__(key)


def read_all(a: Arguments, entries: Sequence[Entry], known: Draft) -> Draft:
    """What the flags say by all `entries`, beside keys that are known before."""
    d = _Reading(a, entries, known)
    for entry in entries:
        for key in entry.keys:
            d.ask(key)
        if not entry.keys:
            d.read(entry)
    return dict(d)
