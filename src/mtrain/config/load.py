"""YAML as data: a bounded reader that knows the line of every key and can neither build objects nor convert slyly.

Numbers and booleans follow YAML 1.2: `1e-5` is a float, `no` and `on` are strings, `12:30:45` is a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mtrain.config.files import read_text
from mtrain.config.paths import display
from mtrain.errors import ConfigError, Problem

MAX_DEPTH, MAX_NODES, MAX_DIGITS = 32, 10_000, 400

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASE = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}
# Characters that change how text is shown without being seen: bidirectional controls, zero-width ones, line breaks
# beside the newline, tags, the BOM.
_SIGHTLESS = "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
HIDDEN = re.compile(f"[{_SIGHTLESS}]")
# Those, the characters that a terminal may obey, which YAML refuses by itself, and those that mark what is unknown.
UNSHOWN = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000\ue001{_SIGHTLESS}]")


@dataclass
class Document:
    """What a YAML file says, and where."""

    values: dict[str, Any]
    """Plain mappings, lists and scalars."""
    lines: dict[str, int]
    """Line of every key by its dotted path; items of a list by their index (`defaults.0`)."""
    source: str
    """The file's name as problems show it."""
    packaged: bool = False
    """Whether a comment of the file tells Hydra where its values go (`@package`)."""
    repeated: list[str] = field(default_factory=list)
    """Keys that are written twice, where that is taken."""

    def where(self, path: str) -> str:
        """`file:line` of the key at `path`, or of the nearest key above it."""
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.source}:{self.lines[path]}" if path else self.source


def scalar(text: str) -> Any:
    """The value of an unquoted scalar under YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= MAX_DIGITS:
        if _INT.match(text):
            return int(text)
        if _BASE.match(text):
            return int(text, 0)
        if _FLOAT.match(text):
            return float(text)
    return text


def load(path: Path, source: str | None = None) -> Document:
    """Reads one file.

    Raises:
        ConfigError: missing, unreadable, too large, not UTF-8, not YAML, or YAML that is more than data.
    """
    source = source or display(path)
    return parse(read_text(path, source), source)


def filled(document: Document) -> Document:
    """The document, which must say something.

    Raises:
        ConfigError: it is empty, or holds nothing but comments.
    """
    if document.values:
        return document
    fix = "write what differs from the defaults, as in `trainer: {train_iters: 100}`, or name no file"
    raise ConfigError([Problem("MT003", "", None, "the file says nothing", fix, document.source)])


def refuse_hidden(text: str, source: str, pattern: re.Pattern[str] = HIDDEN) -> None:
    """Refuses text with characters that change how it is shown without being seen, or others of a `pattern`.

    Raises:
        ConfigError: with the line of the first one.
    """
    hidden = pattern.search(text)
    if hidden:
        line = text.count("\n", 0, hidden.start()) + 1
        rule = f"the invisible character U+{ord(hidden.group()):04X} is refused"
        raise ConfigError([Problem("MT003", "", None, rule, "delete it", f"{source}:{line}")])


def parse(text: str, source: str, *, foreign: bool = False) -> Document:
    """Reads YAML text whose top level is a mapping (or nothing).

    With `foreign` it is another system's: keys may have dots, and the later of two that are the same counts.

    Raises:
        ConfigError: with one problem, which names the line.
    """
    refuse_hidden(text, source)
    reader = _Reader(source, foreign)
    try:
        values = reader.read(yaml.parse(text, Loader=_LOADER))
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(error, text, source)]) from None
    return Document(values, reader.lines, source, "@package" in text, reader.repeated)


def _syntax(error: yaml.YAMLError, text: str, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    if mark is None and isinstance(position, int):
        line = text.encode()[:position].count(b"\n") + 1
    elif mark is None:
        return Problem("MT003", "", None, f"not YAML: {_explained(said, '')}", "delete what is not YAML", source)
    else:
        line = mark.line + 1
    lines = text.splitlines()
    excerpt = lines[line - 1].replace("\t", "<TAB>")[:80] if line <= len(lines) else "the end of the file"
    fix = "indent with spaces" if "<TAB>" in excerpt else "delete the line, or write it as YAML"
    rule = f"not YAML: {_explained(said, excerpt)}, at: {excerpt.strip()}"
    return Problem("MT003", "", None, rule, fix, f"{source}:{line}")


_EXPLAINED = {
    "mapping values": "a second colon in one line, or an indentation unlike that of the lines beside it",
    "',' or": "a bracket that is opened is not closed, or a comma is missing",
    "cannot start": "a value cannot begin so; put it into quotes",
    "end of stream": "a quote that is opened is not closed",
    "expected key": "an indentation unlike that of the lines beside it, a bracket too many, or text behind a quote",
    "document start": "there is more behind the end of the last bracket",
    "escape": "a backslash in double quotes with no meaning; take single quotes",
    "control characters": "a control character",
    "special characters": "a control character",
    "alphabetic": "an & or * without a name; put the value into quotes",
    "indicator": "an item of a list and a key side by side",
    "node content": "a bracket or a sign where a value is to stand",
    "comment or line break": "text behind | or >; it begins on the next line",
    "expected ':'": "a key without its colon",
    "directive": "a line with % at its begin; only YAML's text is read",
    "incompatible": "a version of YAML that there is not",
    "tag": "a tag that does not end",
}
"""Words of what the parser says -> what that means to whoever wrote the file."""


def _explained(said: str, excerpt: str) -> str:
    if "<TAB>" in excerpt:
        return "a tab; YAML is indented with spaces"
    return next((text for words, text in _EXPLAINED.items() if words in said), "the text has no meaning here")


@dataclass
class _Anchor:
    value: Any
    nodes: int
    depth: int


@dataclass
class _Open:
    """A collection that is being read."""

    value: dict[str, Any] | list[Any]
    path: str
    anchor: str | None
    nodes_before: int
    key: str | None = None
    key_lines: dict[str, int] = field(default_factory=dict)
    inner_depth: int = 0


class _Reader:
    """Turns parser events into plain values, counting nodes and depth with every alias expanded."""

    def __init__(self, source: str, foreign: bool) -> None:
        self.source = source
        self.foreign = foreign
        self.repeated: list[str] = []
        self.lines: dict[str, int] = {}
        self.anchors: dict[str, _Anchor] = {}
        self.stack: list[_Open] = []
        self.nodes = 0
        self.root: Any = None
        self.documents = 0

    def refuse(self, code: str, rule: str, event: Any, path: str = "", fix: str = "delete it") -> ConfigError:
        line = event.start_mark.line + 1
        return ConfigError([Problem(code, path, None, rule, fix, f"{self.source}:{line}")])

    def read(self, events: Iterator[Any]) -> dict[str, Any]:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise self.refuse("MT003", "a second document begins; one file is one document", event)
            elif isinstance(event, yaml.ScalarEvent):
                self.scalar(event)
            elif isinstance(event, yaml.AliasEvent):
                self.alias(event)
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self.open(event)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self.close(event)
        if self.root is None:
            return {}
        if not isinstance(self.root, dict):
            raise ConfigError(
                [
                    Problem(
                        "MT003",
                        "",
                        None,
                        "the top level must be a mapping of keys",
                        "write `key: value`",
                        self.source,
                    )
                ]
            )
        return self.root

    def check(self, event: Any, nodes: int, depth: int) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            raise self.refuse(
                "MT006", f"the tag {short} is refused: a configuration is data", event, fix="delete the tag"
            )
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.refuse("MT005", f"more than {MAX_NODES} values with every alias expanded", event)
        if len(self.stack) + depth > MAX_DEPTH:
            raise self.refuse("MT005", f"nested deeper than {MAX_DEPTH} levels", event)

    def scalar(self, event: Any) -> None:
        self.check(event, 1, 0)
        value = scalar(event.value) if event.implicit[0] and not event.style else event.value
        if self.awaits_key():
            self.key(event, value)
        else:
            self.put(value, event)
            if event.anchor:
                self.anchors[event.anchor] = _Anchor(value, 1, 0)

    def alias(self, event: Any) -> None:
        anchor = self.anchors.get(event.anchor)
        if anchor is None:
            raise self.refuse("MT003", f"the alias *{event.anchor} stands for nothing", event)
        self.check(event, anchor.nodes, anchor.depth)
        if self.awaits_key():
            raise self.refuse("MT003", "an alias cannot be a key", event)
        self.put(_copy(anchor.value), event)

    def open(self, event: Any) -> None:
        self.check(event, 1, 1)
        if self.awaits_key():
            raise self.refuse("MT003", "a key must be a plain word", event)
        value: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        path = self.path_of_next()
        self.put(value, event)
        self.stack.append(_Open(value, path, event.anchor, self.nodes))

    def close(self, event: Any) -> None:
        done = self.stack.pop()
        depth = done.inner_depth + 1
        if self.stack:
            self.stack[-1].inner_depth = max(self.stack[-1].inner_depth, depth)
        if done.anchor:
            self.anchors[done.anchor] = _Anchor(done.value, self.nodes - done.nodes_before + 1, depth)

    def awaits_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].value, dict) and self.stack[-1].key is None

    def key(self, event: Any, value: Any) -> None:
        top = self.stack[-1]
        line = event.start_mark.line + 1
        name = event.value
        path = f"{top.path}.{name}" if top.path else name
        if not isinstance(value, str) or not name:
            rule = f"the key {name!r} is no word; a key is text"
            comma = isinstance(value, int) and bool(top.value)  # {train_iters: 1,000}
            fix = "write numbers without commas" if comma else "delete it"
            raise self.refuse("MT003", f"{rule}, and a number has no commas" if comma else rule, event, fix=fix)
        if name in top.key_lines and self.foreign:
            self.repeated.append(path)
        elif name in top.key_lines:
            first = top.key_lines[name]
            rule = f"written twice in one mapping, at lines {first} and {line}"
            raise self.refuse("MT004", rule, event, path, "keep one of them")
        if "." in name and not self.foreign:
            rule = "dots do not nest in a file"
            fix = f"write `{name.replace('.', ': {')}: ...{'}' * name.count('.')}`"
            raise self.refuse("MT003", rule, event, path, fix)
        top.key_lines[name] = line
        top.key = name
        self.lines[path] = line

    def path_of_next(self) -> str:
        if not self.stack:
            return ""
        top = self.stack[-1]
        name = str(len(top.value)) if isinstance(top.value, list) else top.key
        return f"{top.path}.{name}" if top.path else str(name)

    def put(self, value: Any, event: Any) -> None:
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            self.lines[self.path_of_next()] = event.start_mark.line + 1
            top.value.append(value)
        else:
            assert top.key is not None
            top.value[top.key] = value
            top.key = None


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value
