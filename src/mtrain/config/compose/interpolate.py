"""References between keys: `${trainer.train_iters}`. No resolver, no environment, no code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtrain.config.messages.keys import is_content
from mtrain.config.messages.suggestions import at_default
from mtrain.errors import MAX_PROBLEMS, Problem

# Limits: references behind one value, and characters and items that all references may expand to.
MAX_REFERENCES = 100
MAX_UNFOLDED = 1 << 20
# The fix for a reference that a file may not have, whatever overrides it.
BY_HAND = "write the value itself, or delete the line"

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
# A dotted key.
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*\Z")


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested mappings with its dotted key; an empty mapping is a leaf."""
    if isinstance(values, dict) and (values or not prefix):
        for key, value in values.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values


def refused(values: Any, where: Callable[[str], str], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for every string with `${...}` that is more than a reference."""
    for path, value in leaves(values, prefix):
        for text in _strings(value):
            if "${" not in text:
                continue
            bodies = _REFERENCE.findall(text)
            if "${" in _REFERENCE.sub("", text) or not all(KEY.match(body) for body in bodies):
                rule = (
                    "only a reference to another key is allowed, as in ${trainer.train_iters};"
                    " resolvers never run"
                )
                # A fix must be a word of a command line; text that the user wrote is not replaced
                # by a default.
                if where(path) == "command line" and not is_content(path):
                    fix = at_default(path)
                else:
                    fix = BY_HAND
                yield Problem("MT007", path, value, rule, fix, where(path))


def resolve_references(values: dict[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """Replace references in `values` by their values; return a problem for each that cannot be."""
    table = dict(leaves(values))
    follower = _Follower(table)
    problems: list[Problem] = []
    for path, value in table.items():
        if not any("${" in text for text in _strings(value)):
            continue
        if len(problems) > MAX_PROBLEMS:
            break
        try:
            put(values, path, follower.begin(path, value))
        except ValueError as error:
            problems.append(
                Problem("MT007", path, value, str(error), _of_reference(path), where(path))
            )
    return problems


class _Follower:
    """A resolver of references, bounded in their number per value and in their total size."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table
        self.left = MAX_REFERENCES
        self.room = MAX_UNFOLDED

    def begin(self, path: str, value: Any) -> Any:
        """Return the value at `path` with its references resolved.

        Raises:
            ValueError: a reference cannot be resolved.
        """
        self.left = MAX_REFERENCES
        return self.follow(value, (path,))

    def follow(self, value: Any, chain: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self.follow(item, chain) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        # A lone reference keeps the type of its target; inside text it becomes text.
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self.target(whole.group(1), chain)
        return _REFERENCE.sub(lambda m: str(self.target(m.group(1), chain)), value)

    def target(self, key: str, chain: tuple[str, ...]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"more than {MAX_REFERENCES} references are needed for this value")
        if key in chain:
            raise ValueError(f"the reference goes in a circle: {' -> '.join([*chain, key])}")
        if key not in self.table:
            raise ValueError(f"${{{key}}} names no key that has a value")
        value = self.table[key]
        # References to references multiply: ten levels of ten make 10^10 characters (the billion
        # laughs).
        self.room -= len(value) if isinstance(value, (str, list)) else 1
        if self.room < 0:
            raise ValueError(f"references stand for more than {MAX_UNFOLDED} characters")
        return self.follow(value, (*chain, key))


def _of_reference(path: str) -> str:
    """Return the default for a reference that leads nowhere, unless the key takes free text."""
    return ("" if is_content(path) else at_default(path)) or BY_HAND


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def at(values: Any, path: str, absent: Any = None) -> Any:
    """Return the value at a dotted key of nested mappings; `absent` where there is none."""
    for name in path.split(".") if path else ():
        if not isinstance(values, Mapping) or name not in values:
            return absent
        values = values[name]
    return values


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key of nested mappings; replace any value above it that is no mapping."""
    *parents, last = path.split(".")
    for name in parents:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def drop(values: dict[str, Any], path: str) -> None:
    """Remove a dotted key of nested mappings, if it exists."""
    section, _, name = path.rpartition(".")
    node = at(values, section)
    if isinstance(node, dict):
        node.pop(name, None)
