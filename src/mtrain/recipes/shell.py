"""A reader of shell scripts that executes nothing.

It follows the assignments of a script, its arrays and the expansions of its own variables, and returns the commands
with their words. What only running the script could tell (the environment, the output of a command, a condition) is
marked as unknown and never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mtrain.errors import BadInput, Problem
from mtrain.recipes.arithmetic import whole_number
from mtrain.recipes.words import Part, Raw, Statement, quoted, statements

MAX_EXPANDED, MAX_DEPTH = 4 << 20, 16
UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
"""A piece of a word that only running the script could tell; group 1 says what it is, such as `$SLURM_NNODES`."""

_PIECE = re.compile("(?:[^\\s\ue000]|\ue000[^\ue001]*\ue001)+")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)\Z", re.DOTALL)
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]*)(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?\Z", re.DOTALL)
_OPENING = ("if", "while", "until", "for", "case", "select")
_INNER = ("then", "do", "else", "elif", "!", "{", "}", "time")
_CLOSING = ("fi", "done", "esac")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")


def unknown(what: str) -> str:
    """The mark of a piece that cannot be known."""
    return f"\ue000{what}\ue001"


def shown(text: str) -> str:
    """A word with its unknown pieces as the script spells them."""
    return UNKNOWN.sub(r"\1", text)


@dataclass
class Command:
    """One command of a script, its words expanded as far as they can be known."""

    words: list[str]
    where: str
    """`file:line`."""
    conditional: bool
    """Whether it runs only under a condition, or in a loop."""


@dataclass
class Script:
    """What a script says without being run."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Every variable's last value; a plain one has one item."""
    conditional: dict[str, str] = field(default_factory=dict)
    """Variables that are also set under a condition, with `file:line`; their value here is the one before."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Flags that the script adds under a condition only, with `file:line`."""


def read_script(*texts: tuple[str, str]) -> Script:
    """Reads scripts, each a text with its name, as if the later ones had sourced the earlier.

    Raises:
        BadInput: quotes or brackets that do not close, or text that expands without bounds.
    """
    reader = _Reader()
    for text, source in texts:
        reader.source = source
        for statement in statements(text, source):
            reader.take(statement)
    return reader.script


class _Reader:
    """Follows a script statement by statement."""

    def __init__(self) -> None:
        self.source = ""
        self.script = Script()
        self.depth = 0
        self.left = MAX_EXPANDED
        self.line = 0

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"

    def take(self, statement: Statement) -> None:
        self.line = statement.line
        words = list(statement.words)
        while words and (keyword := words[0].keyword) is not None:
            if keyword in _OPENING:
                self.depth += 1
                words = [] if keyword in ("for", "case", "select") else words[1:]
            elif keyword in _CLOSING:
                self.depth = max(0, self.depth - 1)
                words = words[1:]
            elif keyword in _INNER:
                words = words[1:]
            elif keyword in _DECLARING:
                words = [w for w in words[1:] if not (w.keyword or "").startswith("-")]
            else:
                break
        conditional = self.depth > 0
        while words and self._assigned(words[0], conditional or statement.conditional):
            words.pop(0)
        out: list[str] = []
        for raw in words:
            out += self.expand(raw)
        if out:
            self.script.commands.append(Command(out, self.where, conditional))

    def _assigned(self, raw: Raw, conditional: bool) -> bool:
        """Takes an assignment; False where the word is none."""
        first = raw.parts[0] if raw.parts else None
        match = _ASSIGNMENT.match(first.text) if first is not None and first.kind == "text" else None
        if match is None or first is None or first.quoted:
            return False
        name, more = match[1], bool(match[2])
        if raw.array is not None:
            value = [word for item in raw.array for word in self.expand(item)]
        else:
            value = [self.joined([Part("text", match[3], False), *raw.parts[1:]])]
        if conditional:
            self.script.conditional.setdefault(name, self.where)
            words = value if raw.array is not None else _PIECE.findall(value[0])
            self.script.left_out += [(shown(w), self.where) for w in words if w.startswith("--")]
            return True
        before = self.script.variables.get(name, [])
        if more and raw.array is not None:
            value = [*before, *value]
        elif more:
            value = [*before[:-1], (before[-1] if before else "") + value[0]]
        self.spend(sum(map(len, value)))
        self.script.variables[name] = value
        return True

    def spend(self, size: int) -> None:
        self.left -= size + 1
        if self.left < 0:
            rule = f"expands to more than {MAX_EXPANDED} characters"
            raise BadInput([Problem("MT005", "", None, rule, "", self.where)])

    def joined(self, parts: list[Part], depth: int = 0) -> str:
        """Parts as one text, without splitting: what an assignment stores."""
        return "".join(p.text if p.kind == "text" else " ".join(self.value(p, depth)) for p in parts)

    def expand(self, raw: Raw) -> list[str]:
        """The words that a word becomes: none for an empty variable, several for an array or an unquoted list."""
        out: list[str] = []
        current, started = "", False
        for part in raw.parts:
            if part.kind == "text":
                current, started = current + part.text, True
                continue
            items = self.value(part, 0)
            if not part.quoted:
                pieces = [piece for item in items for piece in _PIECE.findall(item)]
                spaced = bool(items) and items[0][:1].isspace(), bool(items) and items[-1][-1:].isspace()
            else:
                pieces, spaced = items, (False, False)
            if spaced[0] and started:
                out.append(current)
                current, started = "", False
            for index, piece in enumerate(pieces):
                if index:
                    out.append(current)
                    current = ""
                current, started = current + piece, True
            if spaced[1] and started:
                out.append(current)
                current, started = "", False
        if started:
            out.append(current)
        self.spend(sum(map(len, out)))
        return out

    def value(self, part: Part, depth: int) -> list[str]:
        """What an expansion stands for; an array gives its items."""
        if depth > MAX_DEPTH:
            raise BadInput([Problem("MT005", "", None, "expansions are nested too deep", "", self.source)])
        if part.kind == "command":
            return [unknown(f"$({part.text})")]
        if part.kind == "arithmetic":
            number = whole_number(part.text, self._number)
            return [str(number) if number is not None else unknown(f"$(({part.text}))")]
        match = _BRACED.match(part.text)
        if match is None:
            if part.text[:1] in ("@", "*"):
                return []  # the script's own arguments: none are given
            return [unknown(f"${{{part.text}}}")]
        name, index, operator, word = match[1], match[2], match[3], match[4] or ""
        held = self.script.variables.get(name)
        items = self._indexed(held, index, part.quoted)
        present = items is not None and (any(items) or not (operator or "").startswith(":"))
        if operator is None or operator.endswith("?"):
            out = items if items is not None else [unknown(f"${name}")]
        elif operator.endswith("+"):
            out = [self._inner(word, depth)] if present else [""]
        else:
            out = items if present and items is not None else [self._inner(word, depth)]
            if operator.endswith("="):
                self.script.variables.setdefault(name, out)
        self.spend(sum(map(len, out)))
        return out

    def _indexed(self, held: list[str] | None, index: str | None, quoted: bool) -> list[str] | None:
        if held is None:
            return None
        if index is None:
            return held[:1] or [""]
        if index in ("[@]", "[*]"):
            return [" ".join(held)] if index == "[*]" and quoted else list(held)
        place = int(index[1:-1])
        return [held[place]] if place < len(held) else [""]

    def _inner(self, text: str, depth: int) -> str:
        """The text behind `:-`, which may hold expansions."""
        return self.joined(quoted(text, self.source).parts, depth + 1)

    def _number(self, name: str) -> str | None:
        held = self.script.variables.get(name)
        return held[0] if held else None
