"""Expansions of a shell script's own variables, without running anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mtrain.errors import ConfigError, Problem
from mtrain.recipes.arithmetic import whole_number
from mtrain.recipes.words import Part, Raw, quoted

MAX_EXPANDED, MAX_DEPTH = 4 << 20, 16
UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
"""A piece of a word that only running the script could tell; group 1 says what it is, such as `$SLURM_NNODES`."""
PIECE = re.compile("(?:[^\\s\ue000]|\ue000[^\ue001]*\ue001)+")
"""A word of a text that is split at spaces."""

_ARGUMENTS = re.compile(r"([@*])(?::\s*([0-9]{1,6}))?\Z")
_BRACED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[1-9][0-9]*)(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?\Z", re.DOTALL)


def unknown(what: str) -> str:
    """The mark of a piece that cannot be known."""
    return f"\ue000{what}\ue001"


def shown(text: str) -> str:
    """A word with its unknown pieces as the script spells them."""
    return UNKNOWN.sub(r"\1", text)


class Expander:
    """The variables of a script, and what words become by them."""

    def __init__(self, variables: dict[str, list[str]]) -> None:
        self.variables = variables
        self.source = ""
        self.line = 0
        self.left = MAX_EXPANDED
        self.read: set[str] = set()
        """Names of the variables that were expanded since it was emptied."""
        self.all_given = False
        """Whether `$1`, `$2`, ... are all known, as in a function that is called with words of the script."""

    @property
    def where(self) -> str:
        """`file:line` of what is read."""
        return f"{self.source}:{self.line}"

    def spend(self, size: int) -> None:
        self.left -= size + 1
        if self.left < 0:
            rule = f"expands to more than {MAX_EXPANDED} characters"
            raise ConfigError([Problem("MT005", "", None, rule, "", self.where)])

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
                pieces = [piece for item in items for piece in PIECE.findall(item)]
                spaced = bool(items) and items[0][:1].isspace(), bool(items) and items[-1][-1:].isspace()
            else:
                pieces, spaced = items, (False, False)
                started = started and bool(items or current)  # "$@" of nothing is no word
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
            raise ConfigError([Problem("MT005", "", None, "expansions are nested too deep", "", self.source)])
        if part.kind == "command":
            return [unknown(f"$({part.text})")]
        if part.kind == "arithmetic":
            number = whole_number(part.text, self.number)
            return [str(number) if number is not None else unknown(f"$(({part.text}))")]
        match = _BRACED.match(part.text)
        if match is None:
            return self._arguments(part)
        name, index, operator, word = match[1], match[2], match[3], match[4] or ""
        self.read.add(name)
        held = self.variables.get(name)
        items = self._indexed(held, index, part.quoted)
        present = items is not None and (any(items) or not (operator or "").startswith(":"))
        if operator is None or operator.endswith("?"):
            missing = "" if self.all_given and name.isdigit() else unknown(f"${name}")
            out = items if items is not None else [missing]
        elif operator.endswith("+"):
            out = [self._inner(word, depth)] if present else [""]
        else:
            out = items if present and items is not None else [self._inner(word, depth)]
            if operator.endswith("="):
                self.variables.setdefault(name, out)
        self.spend(sum(map(len, out)))
        return out

    def _arguments(self, part: Part) -> list[str]:
        """`$@`, `${@:2}`, `$*` and `$#`; of the script's own arguments none are given."""
        self.read.add("@")
        given = self.variables.get("@", [])
        if part.text == "#" and self.all_given:
            return [str(len(given))]
        match = _ARGUMENTS.match(part.text)
        if match is None:
            return [unknown(f"${{{part.text}}}")]
        given = given[max(0, int(match[2] or 1) - 1) :]
        return [" ".join(given)] if match[1] == "*" and part.quoted else given

    def give(self, words: Sequence[str]) -> None:
        """Sets `$1`, `$2`, ... and `$@`."""
        for name in self.given_names():
            del self.variables[name]
        self.variables["@"] = list(words)
        self.variables |= {str(index): [word] for index, word in enumerate(words, 1)}

    @contextmanager
    def arguments(self, words: Sequence[str], all_given: bool) -> Iterator[None]:
        """Has `words` as `$1`, `$2`, ... for a while."""
        before, kept = {name: self.variables[name] for name in self.given_names()}, self.all_given
        self.give(words)
        self.all_given = all_given
        yield
        for name in self.given_names():
            del self.variables[name]
        self.variables |= before
        self.all_given = kept

    def given_names(self) -> list[str]:
        """`1`, `2`, ... and `@`, as far as they are set."""
        return [name for name in self.variables if name.isdigit() or name == "@"]

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

    def number(self, name: str) -> str | None:
        self.read.add(name)
        held = self.variables.get(name)
        return held[0] if held else None
