"""Ways to spoil the text of a recipe."""

from __future__ import annotations

import random
from collections.abc import Callable

VALUES = (
    "",
    "~",
    "null",
    "true",
    "False",
    "no",
    "yes",
    "on",
    "-1",
    "0",
    "1",
    "2.0",
    "2.5",
    "1e-5",
    "1e400",
    "-.inf",
    ".nan",
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    "0x10",
    "0o17",
    "1_000",
    "12:30:45",
    "2001-01-01",
    "'2'",
    '"2"',
    "two",
    "é",
    "[]",
    "[1, 2]",
    "[[1]]",
    "[null]",
    "{}",
    "{a: 1}",
    "{a: {b: {c: 1}}}",
    "[1, [2, {a: b}]]",
    "x" * 300,
    "- 1",
    "${optim.lr}",
    "${oc.env:CANARY}",
    "${${a}}",
    "${",
    "${a.b",
    "}",
    "${nothing}",
    "${trainer.train_iters}",
    "../../etc/passwd",
    "/etc/shadow",
    "~root/x",
    "file:///etc/passwd",
    "a;rm -rf x",
    "$(id)",
    "`id`",
    "a|b",
    "&& id",
    "!!python/name:os.system",
    "!!int '2'",
    "!local x",
    "&a 1",
    "*a",
    "|",
    ">-",
    "'",
    '"',
    "@x",
    "%x",
    "<<",
    "? a",
    "\\x1b[31m",
    '"\\e[31m"',
    '"\\0"',
    '"\\u202e"',
    "\u202ea",
    "a\0b",
    "\x07",
    "\ufeff",
    "\u2028",
    "\U0001f600",
    "\ud7ff",
)
LINES = (
    "_target_: os.system",
    "hydra: {run: {dir: /tmp/x}}",
    "hydra: {searchpath: [file:///tmp]}",
    "defaults: [/hydra/x]",
    "# @package _global_",
    "<<: *a",
    "---",
    "...",
    "%YAML 1.1",
    "!!map",
    "? x",
    ": y",
    "- z",
    "\tq: 1",
    "  q: 1",
    "q: &a [1, 2]",
    "q: *a",
    "recipe: x",
    "run: y",
    "override /model: x",
    "_args_: [1]",
    "optim.lr: 1",
    "0: 1",
    "null: 1",
    "q: " + "[" * 40,
    "q: " + "[" * 40 + "]" * 40,
    "q: " + "{a: " * 40 + "1" + "}" * 40,
    "q: " + "[1," * 12_000 + "]",
)
BYTES = (
    b"\xff",
    b"\xfe\xff",
    b"\x00",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\r",
    b"\x85",
    b"\xe2\x80\xae",
    b"\xef\xbb\xbf",
)
Mutator = Callable[[str, random.Random], str]


def _line(text: str, rng: random.Random, change: Callable[[str], str]) -> str:
    lines = text.splitlines() or [""]
    row = rng.randrange(len(lines))
    lines[row] = change(lines[row])
    return "\n".join(lines) + "\n"


def _typo(text: str, rng: random.Random) -> str:
    def spoilt(line: str) -> str:
        at = rng.randrange(len(line) + 1)
        return rng.choice(
            (
                line[:at] + line[at + 1 :],
                line[:at] + rng.choice("abz_-. :") + line[at:],
                line[:at] + line[at:].swapcase(),
            )
        )

    return _line(text, rng, spoilt)


def _value(text: str, rng: random.Random) -> str:
    return _line(text, rng, lambda line: f"{line.split(':')[0]}: {rng.choice(VALUES)}")


def _insert_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    where = rng.randrange(len(lines) + 1)
    lines.insert(where, " " * rng.choice((0, 0, 2, 4)) + rng.choice(LINES))
    return "\n".join(lines) + "\n"


def _repeat_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines() or [""]
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return "\n".join(lines) + "\n"


def _drop_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines() or [""]
    del lines[rng.randrange(len(lines))]
    return "\n".join(lines) + "\n"


def _indent(text: str, rng: random.Random) -> str:
    return _line(
        text, rng, lambda line: rng.choice((" ", "  ", "\t", "")) + line.lstrip() if line else " "
    )


def _cut(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.randint(1, 12) :]


def _swap(text: str, rng: random.Random) -> str:
    a, b = sorted(rng.sample(range(len(text) + 1), 2)) if text else (0, 0)
    return text[b:] + text[a:b] + text[:a]


def _root(text: str, rng: random.Random) -> str:
    return rng.choice(
        (
            "- " + text,
            "[" + text + "]",
            "'" + text,
            "2\n",
            "null\n",
            "",
            "text\n",
            f"{text}---\n{text}",
        )
    )


def _ends(text: str, rng: random.Random) -> str:
    return rng.choice(
        (
            text.replace("\n", "\r\n"),
            text.replace("\n", "\r"),
            "\ufeff" + text,
            text.replace("  ", "\t"),
        )
    )


def _bomb(text: str, rng: random.Random) -> str:
    begin = 'a0: &a0 ["x", "x", "x", "x", "x", "x", "x", "x"]\n'
    rows = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, rng.randint(2, 9))]
    return begin + "".join(rows) + text


def _splice(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(VALUES) + text[at:]


MUTATORS: tuple[Mutator, ...] = (
    _typo,
    _typo,
    _value,
    _value,
    _value,
    _insert_line,
    _insert_line,
    _repeat_line,
    _drop_line,
    _indent,
    _cut,
    _swap,
    _root,
    _ends,
    _bomb,
    _splice,
)


def mutated(text: str, rng: random.Random) -> bytes:
    """Return `text` spoilt one to three times, and sometimes as bytes that are not text."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(MUTATORS)(text, rng)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(BYTES) + data[at:]
    return data
