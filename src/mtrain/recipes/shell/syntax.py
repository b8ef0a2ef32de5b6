"""What a shell script consists of: commands, branches, loops, groups and functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mtrain.recipes.shell.lexer import Raw

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^]]*\])?(\+?)=", re.DOTALL)


@dataclass
class Command:
    """One command, or assignments alone."""

    words: list[Raw]
    line: int
    text: str
    """As it is written, in one line."""
    stdin: Raw | None = None
    """The text behind `<<`, as it is expanded."""
    writes: list[Raw] = field(default_factory=list)
    """The words behind `>` and its kin."""


@dataclass
class Branches:
    """An `if`, a `case`, or the right side of `&&` or `||`: at most one of several bodies runs."""

    line: int
    text: str
    first: list[Node]
    """What runs in any case: the first condition."""
    bodies: list[list[Node]]
    whole: bool
    """Whether one of the bodies runs for sure."""
    expected: bool = False
    """Whether the body is what is meant to run, as behind `cd FOLDER &&`."""


@dataclass
class Loop:
    """A body that runs any number of times."""

    line: int
    text: str
    names: list[str]
    """Variables that the loop itself sets."""
    body: list[Node]


@dataclass
class Group:
    """A body that runs once; with `apart` in a shell of its own, whose variables end with it."""

    line: int
    body: list[Node]
    apart: bool


@dataclass
class Function:
    """A body that runs where it is called."""

    line: int
    name: str
    body: list[Node]


Node = Command | Branches | Loop | Group | Function


def assignment(word: Raw) -> re.Match[str] | None:
    """Return the name of a word that is an assignment, its index and its sign; None of
    other words.
    """
    first = word.parts[0] if word.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    return _ASSIGNMENT.match(first.text)


def commands_in(nodes: Sequence[Node]) -> Iterator[Command | Loop]:
    """Yield every command and loop in statements, however deep; functions are left out."""
    for node in nodes:
        if isinstance(node, Command):
            yield node
        elif isinstance(node, Branches):
            yield from commands_in(node.first)
            for body in node.bodies:
                yield from commands_in(body)
        elif isinstance(node, Loop):
            yield node
            yield from commands_in(node.body)
        elif isinstance(node, Group) and not node.apart:
            yield from commands_in(node.body)
