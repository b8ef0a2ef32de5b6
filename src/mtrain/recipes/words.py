"""The words of a shell script: quotes, continuations, expansions, arrays and operators, cut but not expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtrain.errors import ConfigError, Problem

MAX_NESTED = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=\Z")
_PLAIN = re.compile(r"[^ \t\r\n;&|<>()'\"$`\\]+")
_KEYWORD = re.compile(r"[A-Za-z{}!-]+\Z")
_TEST_SIGN = re.compile(r"&&|\|\||[<>()&|;]")
_ARITHMETIC = re.compile(r"\(\([^\n;]*\)\)|\(\([^\n;]*;[^\n;]*;[^\n;]*\)\)")
_BEFORE = ("if", "elif", "while", "until", "for", "then", "else", "do", "!", "{")
_HEREDOC = re.compile(r"<<-?\s*(?:\\?(\w+)|'(\w+)'|\"(\w+)\")")


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
    """The words in brackets behind `NAME=`."""

    @property
    def keyword(self) -> str | None:
        """The word, where it is a plain one that a shell may give a meaning to."""
        if len(self.parts) == 1 and self.array is None and not self.parts[0].quoted:
            part = self.parts[0]
            return part.text if part.kind == "text" and _KEYWORD.match(part.text) else None
        return None

    def is_text(self, text: str) -> bool:
        """Whether the word is `text`, not quoted."""
        return self.parts == [Part("text", text, False)] and self.array is None


@dataclass
class Statement:
    """A command's words, between operators."""

    words: list[Raw]
    line: int
    behind: str
    """The operator before it, such as `&&`; a line break where there is none."""
    ended: str
    """The operator after it."""
    text: str
    """As it is written, in one line."""


def statements(text: str, source: str) -> Iterator[Statement]:
    """Every command of a script in the order of the text, loops and conditions not followed.

    Raises:
        ConfigError: a quote or a bracket that does not close.
    """
    return _Lexer(text.replace("\r\n", "\n"), source).statements()


def quoted(text: str, source: str) -> Raw:
    """A text as the inside of double quotes, those around it left out."""
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        text = text[1:-1]
    raw = Raw()
    _Lexer(f'{text}"', source).quoted(raw)
    return raw


class _Lexer:
    """Walks over a script once."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.at = 0
        self.heredocs: list[str] = []
        self.descriptor = False
        """Whether the operator before belongs to the digits in front of it, as in `2>&1`."""
        self.line, self.line_at = 1, 0

    def bad(self, what: str) -> ConfigError:
        line = self.text.count("\n", 0, min(self.at, len(self.text))) + 1
        return ConfigError([Problem("MT003", "", None, f"not a shell script: {what}", "", f"{self.source}:{line}")])

    def here(self) -> int:
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.line

    def statements(self) -> Iterator[Statement]:
        words: list[Raw] = []
        line, behind, dropped, begin = 1, "\n", False, 0
        while self.at < len(self.text):
            self.blank()
            if self.at >= len(self.text):
                break
            raw = self.test(words)
            if raw is not None:
                line, begin = (line, begin) if words else (self.here(), self.at)
                words += raw
                continue
            self.descriptor = False
            before, sign = self.at, self.operator()
            if self.descriptor and words:
                words.pop()
            if sign is None:
                if self.at >= len(self.text):
                    break
                if not words:
                    line, begin = self.here(), self.at
                word = self.word()
                if not dropped:
                    words.append(word)
                dropped = False
            elif sign in "<>":
                dropped = True
            else:
                if words or sign == ";;":
                    text = " ".join(self.text[begin:before].split()) if words else ""
                    yield Statement(words, line, behind, sign, text)
                    behind = sign
                elif sign != "\n" or behind not in ("&&", "||", "|"):
                    behind = sign
                words, dropped = [], False
        if words:
            yield Statement(words, line, behind, "\n", " ".join(self.text[begin:].split()))

    def test(self, words: Sequence[Raw]) -> list[Raw] | None:
        """What follows in a test, where operators are words: a word behind `[[`, or all from `((` to `))`."""
        first = next((i for i, word in enumerate(words) if word.keyword not in _BEFORE), None)
        if first is None:
            if not _ARITHMETIC.match(self.text, self.at):
                return None
            self.at += 2
            return [Raw([Part("text", "((", False)]), Raw([Part("text", self.balanced("(", "))"), True)])]
        if not words[first].is_text("[[") or words[-1].is_text("]]"):
            return None
        if self.text[self.at] == "\n":
            self.at += 1
            return []
        sign = _TEST_SIGN.match(self.text, self.at)
        if sign is None:
            return [self.word()]
        self.at = sign.end()
        return [Raw([Part("text", sign.group(), False)])]

    def blank(self) -> None:
        """Passes over spaces, continuations and comments."""
        while self.at < len(self.text):
            two = self.text[self.at : self.at + 2]
            if two == "\\\n":
                self.at += 2
            elif two[0] in " \t\r":
                self.at += 1
            elif two[0] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def operator(self) -> str | None:
        """An operator that stands here, passed over; redirections as `<` or `>`."""
        char = self.text[self.at]
        if char == "\n":
            self.at += 1
            self.skip_heredocs()
            return "\n"
        if char in "<>" or self.text.startswith("&>", self.at):
            heredoc = _HEREDOC.match(self.text, self.at)
            if heredoc and not self.text.startswith("<<<", self.at):
                self.heredocs.append(next(filter(None, heredoc.groups())))
                self.at = heredoc.end()
                return None if self.at >= len(self.text) else self.operator_or_space()
            match = re.compile(r"&?[<>]+[|&]?(?:[0-9]+|-(?=\s))?").match(self.text, self.at)
            assert match is not None
            self.descriptor = re.search(r"(?:^|\s)[0-9]+\Z", self.text[max(0, self.at - 8) : self.at]) is not None
            self.at = match.end()
            return ">" if not re.search(r"&[0-9]+\Z|-\Z", match.group()) else self.operator_or_space()
        for sign in ("&&", "||", ";;", "|&", ";", "&", "|", "(", ")"):
            if self.text.startswith(sign, self.at):
                self.at += len(sign)
                return sign
        return None

    def operator_or_space(self) -> str | None:
        """What follows a redirection that has no further word."""
        self.blank()
        if self.at >= len(self.text):
            return "\n"
        return self.operator()

    def skip_heredocs(self) -> None:
        for word in self.heredocs:
            end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(self.text, self.at)
            self.at = end.end() if end else len(self.text)
        self.heredocs = []

    def word(self) -> Raw:
        raw = Raw()
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            if plain:
                self.literal(raw, plain.group(), False)
                self.at = plain.end()
                continue
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t\r\n;&|<>()":
                if char == "(" and len(raw.parts) == 1 and _ARRAY.match(raw.parts[0].text):
                    self.at += 1
                    raw.array = self.array()
                break
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self.bad("a ' does not close")
                raw.parts.append(Part("text", self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif char == '"':
                self.at += 1
                self.quoted(raw)
            elif char in "$`":
                raw.parts.append(self.expansion(False))
            else:
                self.at += 1 if char != "\\" else 2
                self.literal(raw, self.text[self.at - 1 : self.at], False)
        return raw

    def literal(self, raw: Raw, text: str, quoted: bool) -> None:
        last = raw.parts[-1] if raw.parts else None
        if last is not None and last.kind == "text" and last.quoted == quoted:
            last.text += text
        else:
            raw.parts.append(Part("text", text, quoted))

    def quoted(self, raw: Raw) -> None:
        self.literal(raw, "", True)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                after = self.text[self.at + 1]
                self.at += 2
                self.literal(raw, "" if after == "\n" else after, True)
            elif char in "$`":
                raw.parts.append(self.expansion(True))
            else:
                self.at += 1
                self.literal(raw, char, True)
        raise self.bad('a " does not close')

    def expansion(self, quoted: bool) -> Part:
        """What stands behind `$` or between backticks."""
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise self.bad("a ` does not close")
            inside, self.at = self.text[self.at + 1 : end], end + 1
            return Part("command", inside, quoted)
        for opening, closing, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
            if self.text.startswith(opening, self.at):
                self.at += len(opening)
                return Part(kind, self.balanced(opening[-1], closing), quoted)  # type: ignore[arg-type]
        name = _NAME.match(self.text, self.at + 1)
        if name:
            self.at = name.end()
            return Part("variable", name.group(), quoted)
        char = self.text[self.at + 1 : self.at + 2]
        if char and char in "@*#?$!0123456789-":
            self.at += 2
            return Part("variable", char, quoted)
        self.at += 1
        return Part("text", "$", quoted)

    def balanced(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes, which is passed over."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            if depth == 0 and self.text.startswith(closing, self.at):
                self.at += len(closing)
                return self.text[start : self.at - len(closing)]
            char = self.text[self.at]
            depth += (char == opening) - (char == closing[0])
            if depth > MAX_NESTED:
                raise self.bad(f"brackets nested deeper than {MAX_NESTED}")
            if char in "'\"" and opening != "{":
                end = self.text.find(char, self.at + 1)
                self.at = end if end > 0 else self.at
            self.at += 1
        raise self.bad(f"a {opening} does not close")

    def array(self) -> list[Raw]:
        """The words of `NAME=( ... )` up to its bracket."""
        out: list[Raw] = []
        while True:
            self.blank()
            if self.at >= len(self.text):
                raise self.bad("a ( does not close")
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return out
            if char in "\n;&|<>(":
                self.at += 1
                continue
            out.append(self.word())
