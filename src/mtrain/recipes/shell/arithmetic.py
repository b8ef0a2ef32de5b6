"""Integers from text, for `$(( ))` of a shell and the lists of `--moe-layer-freq`."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_TEXT = 500
MAX_DIGITS = 18
MAX_ITEMS = 10_000

_TOKEN = re.compile(r"\s*(?:([0-9]+)|\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?|([-+*/%()\[\],]))")


class _Unreadable(ValueError):
    """A text outside of the small grammar that is read here."""


def whole_number(text: str, variable: Callable[[str], str | None]) -> int | None:
    """Return the value of sums and products of integers and variables; None if unknown."""
    value = _value(text, variable)
    return value if isinstance(value, int) and abs(value) < 10**MAX_DIGITS else None


def pattern_of(text: str) -> list[int] | None:
    """Return the list that `([0]*3+[1]*58)` spells; None for other or longer texts."""
    value = _value(text, lambda name: None)
    return value if isinstance(value, list) else None


def _value(text: str, variable: Callable[[str], str | None]) -> int | list[int] | None:
    try:
        parser = _Parser(text, variable)
        value = parser.sum()
        parser.end()
    except (_Unreadable, ZeroDivisionError, RecursionError):
        return None
    return value


class _Parser:
    """Recursive descent over `+ - * / %`, brackets, lists and names."""

    def __init__(self, text: str, variable: Callable[[str], str | None]) -> None:
        if len(text) > MAX_TEXT:
            raise _Unreadable
        self.tokens: list[tuple[str, str]] = []
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Unreadable
            if match[1]:
                self.tokens.append(("number", match[1]))
            elif match[2]:
                self.tokens.append(("name", match[2]))
            else:
                self.tokens.append(("", match[3]))
            position = match.end()
        self.at = 0
        self.variable = variable

    def end(self) -> None:
        if self.at < len(self.tokens):
            raise _Unreadable

    def sign(self, *signs: str) -> str | None:
        """Return the next token and pass over it, if it is one of `signs`."""
        if self.at < len(self.tokens) and self.tokens[self.at] in [("", s) for s in signs]:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def sum(self) -> int | list[int]:
        value = self.product()
        while sign := self.sign("+", "-"):
            value = _apply(sign, value, self.product())
        return value

    def product(self) -> int | list[int]:
        value = self.atom()
        while sign := self.sign("*", "/", "%"):
            value = _apply(sign, value, self.atom())
        return value

    def atom(self) -> int | list[int]:
        if self.sign("-"):
            return _apply("-", 0, self.atom())
        if self.sign("("):
            value = self.sum()
            if not self.sign(")"):
                raise _Unreadable
            return value
        if self.sign("["):
            return self.items()
        if self.at >= len(self.tokens):
            raise _Unreadable
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "name":
            digits: str | None = self.variable(text)
        else:
            digits = text if kind == "number" else None
        # A shell reads 010 as 8, so leading zeros are refused.
        if digits is None or not re.fullmatch(r"\s*-?(0|[1-9][0-9]{0,17})\s*", digits):
            raise _Unreadable
        return int(digits)

    def items(self) -> list[int]:
        out: list[int] = []
        while not self.sign("]"):
            item = self.sum()
            if not isinstance(item, int):
                raise _Unreadable
            out.append(item)
            if not self.sign(","):
                if not self.sign("]"):
                    raise _Unreadable
                break
        return out


def _apply(sign: str, left: int | list[int], right: int | list[int]) -> int | list[int]:
    if isinstance(left, int) and isinstance(right, int):
        if sign in "/%":
            # a shell rounds towards zero, Python down
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if sign == "/" else left - quotient * right
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        # beyond 64 bits a shell's integers wrap around
        if abs(value) >= 10**MAX_DIGITS:
            raise _Unreadable
        return value
    if sign == "+" and isinstance(left, list) and isinstance(right, list):
        return _bounded(left + right)
    # a list of layers repeated, in either order, as in Python
    if sign == "*" and isinstance(left, list) != isinstance(right, list):
        items, times = (left, right) if isinstance(left, list) else (right, left)
        assert isinstance(items, list)
        assert isinstance(times, int)
        # before the list is made
        if len(items) * max(0, times) > MAX_ITEMS:
            raise _Unreadable
        return items * times
    raise _Unreadable


def _bounded(items: list[int]) -> list[int]:
    if len(items) > MAX_ITEMS:
        raise _Unreadable
    return items
