"""A bounded YAML reader that knows the line of every key and can neither build objects nor guess
types.

Numbers and booleans follow YAML 1.2: `1e-5` is a float, `no`, `on` and `12:30:45` are strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mtrain.config.compose.paths import display
from mtrain.config.disk.files import read_text
from mtrain.errors import ConfigError, Problem

MAX_DEPTH = 32
MAX_NODES = 10_000
MAX_KEYS = 2_000
MAX_DIGITS = 400

# A loader that leaves every scalar as text: this module decides its type.
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
# YAML 1.2. PyYAML follows 1.1, where `no` is false, `12:30:45` is 45045, and `1e-5` is text.
_INT = re.compile(r"[-+]?[0-9]+\Z")
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)\s*\Z")
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
# Characters that change how text is shown without being seen: bidirectional controls, zero-width
# ones, line breaks other than the newline, tags, the BOM.
_SIGHTLESS = (
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
)
HIDDEN = re.compile(f"[{_SIGHTLESS}]")
# Those, the characters that a terminal may obey, which YAML refuses by itself, and those that mark
# what is unknown.
UNSHOWN = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000\ue001{_SIGHTLESS}]")


@dataclass
class Document:
    """The contents of a YAML file, with the place of every key."""

    values: dict[str, Any]
    """Plain mappings, lists and scalars."""
    lines: dict[str, int]
    """The line of every key by dotted path; of list items by index (`defaults.0`)."""
    source: str
    """The file's name as problems show it."""
    text: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    """Dotted path of a number, a boolean or null -> its text."""
    repeated: list[str] = field(default_factory=list)
    """Keys that occur twice, if that is allowed."""

    def where(self, path: str) -> str:
        """Return `file:line` of the key at `path`, or of the nearest key above it."""
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.source}:{self.lines[path]}" if path else self.source


def package_of(document: Document) -> str | None:
    """Return the package that the comment at the head of a file sets, as `# @package _global_`."""
    for line in document.text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            return None
        if found := _PACKAGE.match(line):
            return found.group(1)
    return None


def scalar(text: str) -> Any:
    """Return the value of an unquoted scalar under YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    # int() takes quadratic time in the number of digits.
    if len(text) <= MAX_DIGITS:
        if _INT.match(text):
            return int(text)
        if _BASE.match(text):
            return int(text, 0)
        if _FLOAT.match(text):
            return float(text)
    return text


def load(path: Path, source: str | None = None) -> Document:
    """Read one file.

    Raises:
        ConfigError: missing, unreadable, too large, not UTF-8, not YAML, or YAML that is more than
            data.
    """
    source = source or display(path)
    return parse(read_text(path, source), source)


def filled(document: Document) -> Document:
    """Return the document, which must have contents.

    Raises:
        ConfigError: it is empty, or holds only comments.
    """
    if document.values:
        return document
    fix = (
        "write what differs from the defaults, as in `trainer: {train_iters: 100}`, or name no file"
    )
    raise ConfigError.of("MT003", "", None, "the file is empty", fix, document.source)


def refuse_hidden(text: str, source: str, pattern: re.Pattern[str] = HIDDEN) -> None:
    """Refuse text with invisible characters that change how it is displayed, or with those of a
    `pattern`.

    Raises:
        ConfigError: with the line of the first one.
    """
    hidden = pattern.search(text)
    if hidden:
        line = text.count("\n", 0, hidden.start()) + 1
        rule = f"the invisible character U+{ord(hidden.group()):04X} is refused"
        raise ConfigError.of("MT003", "", None, rule, "delete it", f"{source}:{line}")


def parse(text: str, source: str, *, foreign: bool = False) -> Document:
    """Read YAML text whose top level is a mapping or nothing.

    `foreign` files of other systems may have dots in keys, and the later of two equal keys counts.

    Raises:
        ConfigError: with one problem, which names the line.
    """
    # A reviewer of a recipe must see what it says.
    refuse_hidden(text, source)
    try:
        bounded(text, source)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(error, text, source)]) from None
    reader = _Reader(source, foreign)
    values = reader.value(root, "", 0) if root is not None else None
    if not isinstance(values or {}, dict):
        rule = "the top level must be a mapping of keys"
        raise ConfigError.of("MT003", "", None, rule, "write `key: value`", source)
    return Document(values or {}, reader.lines, source, text, reader.texts, reader.repeated)


def bounded(text: str, source: str) -> None:
    """Check the nesting and size of YAML, and that it has no tags, before anything is built.

    Raises:
        ConfigError: it is nested too deep, too large, several documents, or has a tag.
        yaml.YAMLError: it is not YAML.
    """
    depth = 0
    nodes = 0
    documents = 0
    # Events, not nodes: nothing of a hostile file is built before it is known to be small.
    for event in yaml.parse(text, Loader=_LOADER):
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        nodes += isinstance(event, yaml.NodeEvent)
        tag = getattr(event, "tag", None)
        line = f"{source}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if tag is not None:
            short = tag.replace("tag:yaml.org,2002:", "!!")
            rule = f"the tag {short} is refused: a configuration is data"
            raise ConfigError.of("MT006", "", None, rule, "delete the tag", line)
        if documents > 1:
            rule = "a second document begins; one file is one document"
            raise ConfigError.of("MT003", "", None, rule, "delete it", line)
        if depth > MAX_DEPTH:
            raise ConfigError([_too_deep(line)])
        if nodes > MAX_NODES:
            raise ConfigError([_too_many(line)])


def _too_deep(line: str) -> Problem:
    return Problem("MT005", "", None, f"nested deeper than {MAX_DEPTH} levels", "delete it", line)


def _too_many(line: str) -> Problem:
    rule = f"more than {MAX_NODES} values with every alias expanded"
    return Problem("MT005", "", None, rule, "delete it", line)


def _syntax(error: yaml.YAMLError, text: str, source: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    alias = re.match(r"found undefined alias '?([^']*)'?", said)
    if alias and mark is not None:
        rule = f"the alias *{alias.group(1)} is not defined"
        return Problem("MT003", "", None, rule, "delete it", f"{source}:{mark.line + 1}")
    if mark is None and isinstance(position, int):
        line = text.encode()[:position].count(b"\n") + 1
    elif mark is None:
        rule = f"not YAML: {_explained(said, '')}"
        return Problem("MT003", "", None, rule, "delete what is not YAML", source)
    else:
        line = mark.line + 1
    lines = text.splitlines()
    excerpt = (
        lines[line - 1].replace("\t", "<TAB>")[:80] if line <= len(lines) else "the end of the file"
    )
    fix = "indent with spaces" if "<TAB>" in excerpt else "delete the line, or write it as YAML"
    rule = f"it is not YAML: {_explained(said, excerpt)}, at: {excerpt.strip()}"
    return Problem("MT003", "", None, rule, fix, f"{source}:{line}")


# Words of the parser's messages -> their meaning for the author of a file.
_EXPLAINED = {
    "mapping values": (
        "a second colon in one line, or an indentation unlike that of the lines around it"
    ),
    "',' or": "a bracket that is opened is not closed, or a comma is missing",
    "cannot start": "a value cannot begin so; put it into quotes",
    "end of stream": "a quote that is opened is not closed",
    "expected key": (
        "an indentation unlike that of the lines around it, a bracket too many, or text after a"
        " quote"
    ),
    "document start": "there is text after the last bracket",
    "escape": "a backslash in double quotes with no meaning; take single quotes",
    "control characters": "a control character",
    "special characters": "a control character",
    "alphabetic": "an & or * without a name; put the value into quotes",
    "indicator": "an item of a list and a key side by side",
    "node content": "a bracket or a sign where a value is to stand",
    "comment or line break": "text after | or >; it begins on the next line",
    "expected ':'": "a key without its colon",
    "directive": "a line with % at its begin; only YAML's text is read",
    "incompatible": "a version of YAML that there is not",
    "tag": "a tag that does not end",
}


def _explained(said: str, excerpt: str) -> str:
    if "<TAB>" in excerpt:
        return "a tab; YAML is indented with spaces"
    return next(
        (text for words, text in _EXPLAINED.items() if words in said),
        "the text has no meaning here",
    )


class _Reader:
    """A converter of nodes into plain values that bounds number and depth, aliases expanded."""

    def __init__(self, source: str, foreign: bool) -> None:
        self.source = source
        self.foreign = foreign
        self.repeated: list[str] = []
        self.lines: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self.nodes = 0
        self.keys = 0

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        """Return the value of a node at a dotted path.

        Raises:
            ConfigError: it is too large, or a mapping has an invalid key.
        """
        # Aliases share a node of the parser but are counted each time, which bounds their
        # expansion.
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise ConfigError([_too_many(self.at(node))])
        if depth > MAX_DEPTH or (depth == MAX_DEPTH and not isinstance(node, yaml.ScalarNode)):
            raise ConfigError([_too_deep(self.at(node))])
        if isinstance(node, yaml.ScalarNode):
            value = node.value if node.style else scalar(node.value)
            if not isinstance(value, str):
                self.texts[path] = node.value
            return value
        if isinstance(node, yaml.SequenceNode):
            return [
                self.item(inner, f"{path}.{i}" if path else str(i), depth)
                for i, inner in enumerate(node.value)
            ]
        out: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, inner in node.value:
            name = self.key(key, path, out, lines)
            out[name] = self.value(inner, f"{path}.{name}" if path else name, depth + 1)
        return out

    def item(self, node: yaml.Node, path: str, depth: int) -> Any:
        """Return an item of a list."""
        self.lines[path] = node.start_mark.line + 1
        return self.value(node, path, depth + 1)

    def key(
        self, node: yaml.Node, section: str, before: dict[str, Any], lines: dict[str, int]
    ) -> str:
        """Return the name of a key and record its line; `before`, `lines`: the mapping so far."""
        name = node.value
        line = node.start_mark.line + 1
        self.nodes += 1
        if not isinstance(node, yaml.ScalarNode):
            raise self.refuse("a key must be a plain word", node)
        meant = name if node.style else scalar(name)
        if not isinstance(meant, str) or not name:
            rule = f"the key {meant!r} is no word; a key is text"
            comma = isinstance(meant, int) and bool(before)  # {train_iters: 1,000}
            fix = "write numbers without commas" if comma else "delete it"
            raise self.refuse(
                f"{rule}, and a number has no commas" if comma else rule, node, fix=fix
            )
        path = f"{section}.{name}" if section else name
        if name in lines and self.foreign:
            self.repeated.append(path)
        elif name in lines:
            rule = f"written twice in one mapping, at lines {lines[name]} and {line}"
            raise self.refuse(rule, node, path, "keep one of them", "MT004")
        if "." in name and not self.foreign:
            fix = f"write `{name.replace('.', ': {')}: ...{'}' * name.count('.')}`"
            raise self.refuse("dots do not nest in a file", node, path, fix)
        self.keys += 1
        if self.keys > MAX_KEYS and not self.foreign:
            raise self.refuse(
                f"more than {MAX_KEYS} keys with every alias expanded", node, code="MT005"
            )
        self.lines[path] = line
        lines[name] = line
        return str(name)

    def at(self, node: yaml.Node) -> str:
        """Return `file:line` of a node."""
        return f"{self.source}:{node.start_mark.line + 1}"

    def refuse(
        self,
        rule: str,
        node: yaml.Node,
        path: str = "",
        fix: str = "delete it",
        code: str = "MT003",
    ) -> ConfigError:
        return ConfigError.of(code, path, None, rule, fix, self.at(node))
