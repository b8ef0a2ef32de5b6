"""A resolved configuration as text: the file `run.yaml`, with or without the origin of each key."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from mtrain.config.compose.yaml_reader import scalar
from mtrain.config.schema.run import UnresolvedRun

_CONSTANT = re.compile(r"(?i:null|true|false|nan|inf)\Z")
_BARE = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.:@%+-]*\Z")
_NO_QUOTES = re.compile(r"[A-Za-z0-9_/.:@%+,=\[\]-]*(\{\})?\Z")
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*\Z")


def run_yaml(run: UnresolvedRun, comments: Mapping[str, str] | None = None) -> str:
    """Return every key of `run` as YAML that `run=FILE` reads back to an equal configuration.

    `comments` adds a remark after the leaf at each dotted key, aligned in one column.
    """
    lines = list(_lines(run.to_dict(), "", 0))
    if not comments:
        return "".join(f"{text}\n" for text, _ in lines)
    marks = {path: comments[path] for _, path in lines if path in comments}
    # A long list must not push the comments of all other keys to the right.
    width = min(60, max((len(text) for text, path in lines if path in marks), default=0))
    out = [f"{text:<{width}}  # {marks[path]}" if path in marks else text for text, path in lines]
    return "\n".join(out) + "\n"


def spell(value: Any) -> str:
    """Return a leaf as YAML of one line."""
    if value is None:
        return "null"
    # Before numbers: a bool is an int.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(spell(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{spell(k)}: {spell(v)}' for k, v in value.items())}}}"
    text = str(value)
    # Text that YAML would read as a number, a boolean or null needs quotes.
    if _PLAIN.match(text) and scalar(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else _code(ord(c)) for c in quoted)


def _code(number: int) -> str:
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


def override(key: str, value: Any) -> str:
    """Return `key=value` as one shell word that Hydra's grammar reads back to `value`."""
    if not isinstance(value, str):
        word = f"{key}={_in_brackets(value)}"
        return word if _NO_QUOTES.match(word) else shlex.quote(word)
    if _BARE.match(value) and not _CONSTANT.match(value):
        return f"{key}={value}"
    return shlex.quote(f"{key}={_quoted(value)}")


def _quoted(text: str) -> str:
    """Return a text in the double quotes of Hydra's grammar."""
    # Hydra reads a backslash as itself except before a quote, where it escapes: only those that
    # precede a quote are doubled.
    return '"' + re.sub(r'(\\+)(?="|\Z)', r"\1\1", text).replace('"', '\\"') + '"'


def _in_brackets(value: Any) -> str:
    """Return a list of plain values, or of such lists, without spaces."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_in_brackets, value))}]"
    if isinstance(value, str):
        bare = _PLAIN.match(value) and scalar(value) == value and not _CONSTANT.match(value)
        return value if bare else _quoted(value)
    return spell(value)


def _lines(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else key
        indent = "  " * depth
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:", ""
            yield from _lines(value, path, depth + 1)
        else:
            yield f"{indent}{key}: {spell(value)}", path
