"""The words behind a training script as flags with their values, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mtrain.recipes.shell.gaps import Unread, Word, shown

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

    def __init__(self, words: Iterable[Word], switches: Container[str] = ()) -> None:
        """Take the words apart; `switches` are the flags that take no value."""
        self.flags: dict[str, list[Word]] = {}
        self.stray: list[Word] = []
        self.unplaced: dict[str, Unplaced] = {}
        self.asked: set[str] = set()
        self.notes: list[str] = []
        """What leaving a flag out means there and cannot mean here."""
        self.loose: list[Unread] = []
        """Words that may hold any flag, or none."""
        self.maybe: dict[str, Unread] = {}
        """Flags that such a word holds, perhaps."""
        self.doubts: dict[str, str] = {}
        """Flags that were asked for and are not known, with the reason; whoever reads an entry
        empties it.
        """
        self._behind: dict[str, Unread] = {}
        name = ""
        current = self.stray
        for word in words:
            start = word if isinstance(word, str) else word.start
            if (
                start.startswith("--")
                and len(start) > 2
                and (isinstance(word, str) or "=" in start)
            ):
                name, equals, value = start.partition("=")
                current = self.flags[name] = []
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
        """Return whether a word behind a flag is not its value: it has one, or takes none."""
        return not name or bool(self.flags[name]) or name in switches

    def _set_loose(self, word: Unread, name: str) -> None:
        words = [inner for gap in word.gaps for inner in (gap.words or ())]
        if any(gap.words is None for gap in word.gaps) or any(
            isinstance(w, Unread) and w.whole for w in words
        ):
            self.loose.append(word)
            if name and not word.absent:
                self._behind.setdefault(name, word)
        for inner in words:
            text = inner if isinstance(inner, str) else inner.start
            if text.startswith("--"):
                self.maybe.setdefault(text.partition("=")[0], word)

    def refuse(self, flag: str, why: Why, text: str) -> None:
        """Note that `flag` was not taken over; the first reason holds."""
        if why == "unreadable" and (flag in self.flags or flag in self.maybe):
            self.doubts.setdefault(flag, f"{flag} {text}")
        if flag in self.flags and flag not in self.unplaced:
            self.unplaced[flag] = Unplaced(flag, " ".join(map(shown, self.flags[flag])), why, text)

    def ask(self, flag: str) -> list[Word] | None:
        """Return the words of a flag; one that may be there, or may have more of them,
        is in doubt.
        """
        self.asked.add(flag)
        word = self.maybe.get(flag)
        if word is not None:
            self.doubts.setdefault(flag, f"{flag} may be given: {word.why}")
        return self.flags.get(flag)

    def has(self, flag: str) -> bool:
        """Return whether the flag is there; what follows a switch is no value of it."""
        return self.ask(flag) is not None

    def words(self, flag: str) -> list[str] | None:
        """Return all values of a flag; None where it is not there, or where a value is unknown."""
        found = self.ask(flag)
        if found is None:
            return None
        behind = [self._behind[flag]] if flag in self._behind else []
        unread = [word for word in (*found, *behind) if isinstance(word, Unread)]
        if unread:
            self.refuse(flag, "unreadable", unread[0].why)
            return None
        return [word for word in found if isinstance(word, str)]

    def word(self, flag: str) -> str | None:
        """Return the one value of a flag; None where it is not there or cannot be taken over."""
        found = self.ask(flag)
        if found is None:
            return None
        if len(found) != 1:
            self.refuse(flag, "unreadable", f"takes one value, and has {len(found)}")
            return None
        if isinstance(found[0], Unread):
            self.refuse(flag, "unreadable", found[0].why)
            return None
        return found[0]

    def as_(self, flag: str, convert: Callable[[str], T]) -> T | None:
        """Return the one value of a flag, converted; None where it is not there or cannot be."""
        text = self.word(flag)
        if text is None:
            return None
        try:
            return convert(text)
        except (ValueError, OverflowError):
            self.refuse(
                flag, "unreadable", f"{text[:40]!r} is no {_NAMES.get(convert, 'value of it')}"
            )
            return None


def whole(text: str) -> int:
    """Return a whole number, also as `1000.0` or `1e3`."""
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
    decides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag -> the keys that are not known where its value is not; all keys for a flag that is not
    in it.
    """
    switches: tuple[str, ...] = ()
    """Those of the flags that take no value."""


class _Reading(dict[str, Any]):
    """Keys as they are read: whoever asks for a key has its entry read first, so that their order
    does not matter.

    A key is left open where its entry asked for a flag, or for a key, that is not known.
    """

    def __init__(
        self, a: Arguments, entries: Iterable[Entry], known: Draft, left: dict[str, str]
    ) -> None:
        super().__init__(known)
        self._arguments = a
        self._waiting = {key: entry for entry in entries for key in entry.keys}
        self._left = left

    def ask(self, key: str) -> None:
        """Read the entry of a key; while it is read, its own keys are not there yet."""
        entry = self._waiting.get(key)
        if entry is not None:
            self.read(entry)
        if key in self._left:
            self._arguments.doubts.setdefault(key, self._left[key])

    def read(self, entry: Entry) -> None:
        for key in entry.keys:
            self._waiting.pop(key, None)
        before = self._arguments.doubts
        self._arguments.doubts = {}
        self.update(entry.read(self._arguments, self))
        for name, why in self._arguments.doubts.items():
            for key in entry.decides.get(name, entry.keys):
                self._left.setdefault(key, why)
        self._arguments.doubts = before

    def __getitem__(self, key: str) -> Any:
        self.ask(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.ask(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.ask(str(key))
        return super().__contains__(key)


def read_all(
    a: Arguments, entries: Sequence[Entry], known: Draft, left: dict[str, str] | None = None
) -> Draft:
    """What the flags say by all `entries`, beside keys that are known before.

    `left` are keys that are not known, with the reason; those that follow from them, or from flags
    that are not known, are added.
    """
    d = _Reading(a, entries, known, {} if left is None else left)
    for entry in entries:
        for key in entry.keys:
            d.ask(key)
        if not entry.keys:
            d.read(entry)
    a.doubts = {}
    return dict(d)
