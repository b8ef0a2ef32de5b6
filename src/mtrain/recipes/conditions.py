"""Whether a test of a shell script holds: `[ ]`, `[[ ]]`, `test` and `(( ))` of known texts; nothing is run.

Three values: true, false, and None for what only running the script could tell, such as whether a file is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from mtrain.recipes.arithmetic import whole_number

Truth = bool | None

_WHOLE = re.compile(r"\s*[-+]?[0-9]{1,18}\s*\Z")
_COMPARED = re.compile(r"(.*?)(==|!=|<=|>=|<|>)(.*)\Z", re.DOTALL)
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("-eq", "=="), lambda a, b: a == b),
    **dict.fromkeys(("-ne", "!="), lambda a, b: a != b),
    **dict.fromkeys(("-lt", "<"), lambda a, b: a < b),
    **dict.fromkeys(("-le", "<="), lambda a, b: a <= b),
    **dict.fromkeys(("-gt", ">"), lambda a, b: a > b),
    **dict.fromkeys(("-ge", ">="), lambda a, b: a >= b),
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge")
_UNARY = re.compile(r"-[a-zA-Z]\Z")
MAX_DEPTH, MAX_PATTERN, MAX_TEXT = 50, 100, 1000


class Operand(NamedTuple):
    """A word of a test."""

    text: str
    quoted: bool
    """Whether it is no operator and no pattern."""
    sure: bool = True
    """Whether it is known: no environment, no output of a command, nothing that is set under a condition."""


def both(a: Truth, b: Truth) -> Truth:
    """`a and b`, where one that is false decides."""
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: Truth, b: Truth) -> Truth:
    """`a or b`, where one that is true decides."""
    return negated(both(negated(a), negated(b)))


def negated(a: Truth) -> Truth:
    """`not a`."""
    return None if a is None else not a


def arithmetic_holds(text: str, variable: Callable[[str], str | None]) -> Truth:
    """Whether `(( text ))` holds: one comparison of whole numbers, or a number that is not 0."""
    match = _COMPARED.match(text)
    sides = (match[1], match[3]) if match else (text, "0")
    left, right = (whole_number(side, variable) for side in sides)
    if left is None or right is None:
        return None
    return _NUMBERS[match[2] if match else "!="](left, right)


def test_holds(words: Sequence[Operand], *, double: bool) -> Truth:
    """Whether a test holds, by the words inside its brackets; `double` for `[[ ]]`, whose right sides are patterns.

    None also for what is no test that is read here.
    """
    test = _Test(words, double)
    try:
        found = test.any_of(0)
    except (ValueError, IndexError):
        return None
    return found if test.at == len(words) else None


class _Test:
    """Recursive descent over the words of a test."""

    def __init__(self, words: Sequence[Operand], double: bool) -> None:
        self.words, self.double, self.at = list(words), double, 0

    def sign(self, *signs: str) -> bool:
        """Whether the next word is one of the operators `signs`; it is then behind us."""
        if self.at < len(self.words) and not self.words[self.at].quoted and self.words[self.at].text in signs:
            self.at += 1
            return True
        return False

    def any_of(self, depth: int) -> Truth:
        found = self.all_of(depth)
        while self.sign("||", "-o"):
            found = either(found, self.all_of(depth))
        return found

    def all_of(self, depth: int) -> Truth:
        found = self.one(depth)
        while self.sign("&&", "-a"):
            found = both(found, self.one(depth))
        return found

    def one(self, depth: int) -> Truth:
        if depth > MAX_DEPTH:
            raise ValueError
        if self.sign("!"):
            return negated(self.one(depth + 1))
        if self.sign("(", "\\("):
            found = self.any_of(depth + 1)
            if not self.sign(")", "\\)"):
                raise ValueError
            return found
        left, self.at = self.words[self.at], self.at + 1
        operator = self.words[self.at].text if self.at < len(self.words) else ""
        if operator in _TEXTS and self.at + 1 < len(self.words):
            right, self.at = self.words[self.at + 1], self.at + 2
            return self.compared(left, operator, right)
        if _UNARY.match(left.text) and not left.quoted and self.at < len(self.words):
            operand, self.at = self.words[self.at], self.at + 1
            if left.text not in ("-n", "-z") or not operand.sure:
                return None
            return (operand.text != "") == (left.text == "-n")
        return left.text != "" if left.sure else None

    def compared(self, left: Operand, operator: str, right: Operand) -> Truth:
        if not left.sure or not right.sure or operator == "=~":
            return None
        if operator.startswith("-"):
            if not _WHOLE.match(left.text) or not _WHOLE.match(right.text):
                return None
            return _NUMBERS[operator](int(left.text), int(right.text))
        if operator in "<>":
            return None  # the order of texts is the locale's
        pattern = self.double and not right.quoted
        same = matches(left.text, right.text) if pattern else left.text == right.text
        return same if operator != "!=" else negated(same)


def matches(text: str, pattern: str) -> Truth:
    """Whether a text matches a pattern of the shell, as in `case` and behind `==`; None where they are very long."""
    return None if len(pattern) > MAX_PATTERN or len(text) > MAX_TEXT else fnmatchcase(text, pattern)
