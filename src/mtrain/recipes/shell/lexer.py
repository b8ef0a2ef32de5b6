"""Words of a shell script: quotes, continuations, expansions and arrays, cut but not expanded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from mtrain.errors import ConfigError, Problem

MAX_NESTED = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\Z")
_PLAIN = re.compile(r"[^ \t\r\n;&|<>()'\"$`\\]+")
# the escapes of $'...' are those of C, and \e
_ESCAPES = {char: char for char in "\\'\"?"}
_ESCAPES |= dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))
_ESCAPES |= dict.fromkeys("eE", "\x1b")


@dataclass
class Part:
    """A piece of a word."""

    kind: Literal["text", "variable", "command", "arithmetic"]
    text: str
    quoted: bool


@dataclass
class Raw:
    """A word before it is expanded."""

    parts: list[Part] = field(default_factory=list)
    array: list[Raw] | None = None
    """The words in brackets after `NAME=`."""

    @property
    def plain(self) -> str | None:
        """Return the word if no part of it is quoted or expanded."""
        if len(self.parts) == 1 and self.array is None and not self.parts[0].quoted:
            return self.parts[0].text if self.parts[0].kind == "text" else None
        return None


class Lexer:
    """A reader that walks over a text once."""

    def __init__(self, text: str, source: str, line: int = 1) -> None:
        self.text = text
        self.source = source
        self.at = 0
        self._line = line
        self._line_at = 0

    def bad(self, what: str) -> ConfigError:
        """Return the error of a text that is no shell script, at the current place."""
        return ConfigError(
            [Problem("MT003", "", None, f"not a shell script: {what}", "", self.where)]
        )

    @property
    def line(self) -> int:
        """Return the current line."""
        at = min(self.at, len(self.text))
        # counted from the last place: from the beginning, long scripts would take quadratic time
        self._line += self.text.count("\n", self._line_at, at) if at >= self._line_at else 0
        self._line_at = max(at, self._line_at)
        return self._line

    @property
    def where(self) -> str:
        """Return the current place, as `file:line`."""
        return f"{self.source}:{self.line}"

    def ahead(self, *signs: str) -> str:
        """Return the first of `signs` that comes next; empty if none does."""
        return next((sign for sign in signs if self.text.startswith(sign, self.at)), "")

    def blank(self, also: str = "") -> None:
        """Pass over spaces, continuations and comments."""
        while self.at < len(self.text):
            if self.ahead("\\\n"):
                self.at += 2
            elif self.text[self.at] in f" \t\r{also}":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def word(self) -> Raw:
        """Return the word that begins here; it has no parts if no word begins here."""
        raw = Raw()
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                self._literal(raw, plain.group(), False)
                self.at = plain.end()
                continue
            char = self.text[self.at]
            if self.ahead("\\\n"):
                self.at += 2
            # process substitution names a pipe, which exists only in a run
            elif self.ahead("<(", ">("):
                self.at += 2
                raw.parts.append(Part("command", self.balanced("(", ")"), False))
            elif char in " \t\r\n;&|<>()":
                # only directly after NAME= does a bracket begin an array
                if char == "(" and len(raw.parts) == 1 and _ARRAY.match(raw.plain or ""):
                    self.at += 1
                    raw.array = self._array()
                break
            elif self.ahead("$'"):
                self.at += 2
                raw.parts.append(Part("text", self._escaped(), True))
            elif char == "'":
                raw.parts.append(Part("text", self._to("'"), True))
            # $"..." is translated where a catalogue exists, and is the plain text elsewhere
            elif char == '"' or self.ahead('$"'):
                self.at += 1 if char == '"' else 2
                self.quoted(raw)
            elif char in "$`":
                raw.parts.append(self._expansion(False))
            else:
                raw.parts.append(Part("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
        return raw

    def quoted(self, raw: Raw, end: str = '"') -> None:
        """Read a text in double quotes, or with an empty `end` to the end of the text."""
        self._literal(raw, "", True)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == end:
                self.at += 1
                return
            # in double quotes a backslash is an ordinary character before any other one; without a
            # closing quote, as in a here-document, \" is two characters
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in (
                "$",
                "`",
                end or "\\",
                "\\",
                "\n",
            ):
                after = self.text[self.at + 1]
                self.at += 2
                self._literal(raw, "" if after == "\n" else after, True)
            elif char in "$`":
                raw.parts.append(self._expansion(True))
            else:
                self.at += 1
                self._literal(raw, char, True)
        if end:
            raise self.bad('a " does not close')

    def balanced(self, opening: str, closing: str) -> str:
        """Return the text up to the closing bracket outside quotes and comments, and pass it."""
        start = self.at
        depth = 0
        while self.at < len(self.text):
            if depth == 0 and self.ahead(closing):
                self.at += len(closing)
                return self.text[start : self.at - len(closing)]
            char = self.text[self.at]
            depth += (char == opening) - (char == closing[0])
            if depth > MAX_NESTED:
                raise self.bad(f"brackets nested deeper than {MAX_NESTED}")
            if char == "\\":
                self.at += 1
            elif char == '"':
                self._pass_quoted()
                continue
            # within ${...}, a single quote may be the apostrophe of a default
            elif char == "'" and opening != "{":
                self._to("'")
                continue
            self.at += 1
        raise self.bad(f"a {opening} does not close")

    def _pass_quoted(self) -> None:
        """Pass over a text in double quotes, including brackets in it."""
        self.at += 1
        while self.at < len(self.text):
            if self.ahead("$(", "${"):
                opening = self.text[self.at + 1]
                self.at += 2
                self.balanced(opening, ")" if opening == "(" else "}")
                continue
            char = self.text[self.at]
            self.at += 2 if char == "\\" else 1
            if char == '"':
                return
        raise self.bad('a " does not close')

    def _to(self, sign: str) -> str:
        """Return the text between two occurrences of a sign."""
        end = self.text.find(sign, self.at + 1)
        if end < 0:
            raise self.bad(f"a {sign} does not close")
        inside = self.text[self.at + 1 : end]
        self.at = end + 1
        return inside

    def _escaped(self) -> str:
        """Return the inside of `$'...'`, with its escapes replaced."""
        out = b""
        while self.at < len(self.text):
            char = self.text[self.at]
            after = self.text[self.at + 1 : self.at + 2]
            number = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3}))").match(self.text, self.at)
            if char == "'":
                self.at += 1
                return out.decode("utf-8", "replace")
            if number:
                # escapes spell bytes, several of which may make one character
                out += bytes([int(number[1], 16) if number[1] else int(number[2], 8) & 255])
                self.at = number.end()
            elif char == "\\" and after in _ESCAPES:
                out += _ESCAPES[after].encode()
                self.at += 2
            else:
                out += char.encode()
                self.at += 1
        raise self.bad("a ' does not close")

    def _literal(self, raw: Raw, text: str, quoted: bool) -> None:
        last = raw.parts[-1] if raw.parts else None
        if last is not None and last.kind == "text" and last.quoted == quoted:
            last.text += text
        else:
            raw.parts.append(Part("text", text, quoted))

    def _expansion(self, quoted: bool) -> Part:
        """Return the part after `$` or between backticks."""
        if self.text[self.at] == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at + 1)
            if end is None:
                raise self.bad("a ` does not close")
            self.at = end.end()
            return Part("command", end.group()[:-1], quoted)
        if self.ahead("$(("):
            before = self.at
            self.at += 3
            try:
                return Part("arithmetic", self.balanced("(", "))"), quoted)
            except ConfigError:
                self.at = before  # a command that begins with a subshell
        for opening, closing in (("$(", ")"), ("${", "}"), ("$[", "]")):
            if self.ahead(opening):
                self.at += len(opening)
                inside = self.balanced(opening[-1], closing)
                return Part("variable" if opening == "${" else "command", inside, quoted)
        name = _NAME.match(self.text, self.at + 1)
        if name:
            self.at = name.end()
            return Part("variable", name.group(), quoted)
        char = self.text[self.at + 1 : self.at + 2]
        # one digit: $10 is $1 and a 0
        if char and char in "@*#?$!0123456789-":
            self.at += 2
            return Part("variable", char, quoted)
        self.at += 1
        return Part("text", "$", quoted)

    def _array(self) -> list[Raw]:
        """Return the words of `NAME=( ... )` up to its bracket."""
        out: list[Raw] = []
        while True:
            self.blank("\n")
            if self.at >= len(self.text):
                raise self.bad("a ( does not close")
            if self.text[self.at] == ")":
                self.at += 1
                return out
            word = self.word()
            if not word.parts:
                raise self.bad(f"{self.text[self.at]!r} stands in the brackets of an array")
            out.append(word)
