"""Words of a verb that has flags of its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.errors import ConfigError, Problem


@dataclass
class Options:
    """What a verb was given."""

    words: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    """Of the flags that take a value."""
    rest: list[str] | None = None
    """The words behind `--`, untouched."""

    @property
    def as_json(self) -> bool:
        """Return whether a machine reads the answer."""
        return "--json" in self.flags


def read_options(
    arguments: Sequence[str], flags: Sequence[str] = (), valued: Mapping[str, str] = {}
) -> Options:
    """Cuts a verb's arguments into words, flags and flags with a value; `--json` is one everywhere.

    `valued` gives each spelling of a flag with a value its long one.

    Raises:
        ConfigError: a flag that is not there, or that lacks its value.
    """
    out = Options()
    known = ("--json", *flags)
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            out.rest = queue
            break
        if word in known:
            out.flags.add(word)
        elif name in valued and (equals or queue):
            if valued[name] in out.values:
                raise _bad(f"{word}: is given twice", f"{valued[name]} FILE, once")
            out.values[valued[name]] = value if equals else queue.pop(0)
        elif name in valued:
            raise _bad(f"{word}: needs a value", f"{word} FILE")
        elif word.startswith("-") and word != "-" and not equals:
            near = difflib.get_close_matches(word, [*known, *valued], n=1, cutoff=0.5)
            raise _bad(
                f"{word}: there is no such flag here; flags: {', '.join([*known, *valued])}",
                "".join(near),
            )
        else:
            out.words.append(word)
    return out


def _bad(rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem("MT010", "", None, rule, fix, COMMAND_LINE)])


def needed(words: Sequence[str], usage: str) -> str:
    """Return the first word.

    Raises:
        ConfigError: there is none.
    """
    if not words:
        raise _bad("something is missing", usage)
    return words[0]
