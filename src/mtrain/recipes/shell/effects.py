"""What the commands of a shell script do to its variables: what is followed, and what
is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from mtrain.recipes.secrets import names_secret
from mtrain.recipes.shell.expansion import Expander, has_braces, sets_computed
from mtrain.recipes.shell.gaps import Gap, Value, Word, shown, word_of, words_in
from mtrain.recipes.shell.lexer import Part, Raw
from mtrain.recipes.shell.syntax import (
    Branches,
    Command,
    Function,
    Loop,
    Node,
    assignment,
    commands_in,
)

DECLARING = ("export", "readonly", "declare", "typeset", "local")
SETTING = (
    "read",
    "mapfile",
    "readarray",
    "let",
    "getopts",
    "unset",
    "coproc",
    "wait",
    "trap",
    "printf",
)
"""Commands that set variables which their words name."""
_ANY = frozenset(
    ["eval", "source", ".", "command", "builtin", "shift", "set", "alias", "enable", "shopt"]
)
"""Commands that may set any variable, or change what words mean."""
NAMES = re.compile(r"[A-Za-z_]\w*")
_SETS_INSIDE = re.compile(
    r"\$\(\([^)]*(?:\+\+|--|<<=|>>=|[^=!<>]=[^=])|\$\{\w+:?=|\[[^]]*(?:\+\+|--)"
)

_UNKNOWN = Raw([Part("variable", "", False)])
"""A name that is not known."""


class Effects(Expander):
    """Takes assignments, and forgets what other commands may set."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, tuple[str, Function]] = {}
        """Name -> the file of a function, and its statements."""
        self.secrets: dict[str, list[Word]] = {}
        """Every value that variables have had whose names are those of secrets."""
        self.kept: set[str] = set()
        """Variables of scripts before this one, which arguments of this one do not change."""
        self.references: set[str] = set()
        """Names that stand for other variables."""
        self.assumed: set[str] = set()
        """Names whose assignments mean something else: numbers, references, letters of one case."""

    def forget(self, names: Iterable[str], why: str) -> None:
        """Make variables unknown from here on; every one, where a name stands for another
        variable.
        """
        found = dict.fromkeys(names)
        super().forget(found, why)
        if not self.references.isdisjoint(found.keys()):
            self.forget_all(why)

    def forget_set(self, names: Iterable[str], body: Sequence[Node], why: str) -> None:
        """Forget the variables that statements, and the functions that they call, may set."""
        self.forget(names, why)
        bodies = [body]
        seen = set[str]()
        while bodies:
            for found in commands_in(bodies.pop()):
                self.spend(len(found.text))
                if isinstance(found, Loop):
                    self.forget(found.names, why)
                    continue
                for match in filter(None, map(assignment, found.words)):
                    self.forget([match[1]], why)
                    self.calculated(match[2] or "", f"{match[1]}{match[2]}")
                first = next((raw for raw in found.words if not assignment(raw)), Raw())
                name = first.plain or ""
                if _SETS_INSIDE.search(found.text) or name in (*SETTING, *DECLARING):
                    self.forget(NAMES.findall(found.text), why)
                if name:
                    behind = found.words[
                        next(i for i, raw in enumerate(found.words) if raw is first) + 1 :
                    ]
                else:
                    behind = []
                if any(map(_computed_name, _naming(name, behind))):
                    self.forget_all(why)
                if name in self.functions and name not in seen:
                    seen.add(name)
                    bodies.append(self.functions[name][1].body)
                hidden = any(part.kind != "text" or part.quoted for part in first.parts)
                if hidden or name in _ANY:
                    self.forget_all(why)

    def set_arguments(self, name: str, said: list[str], why: str) -> None:
        """`set` and `shift`: other arguments, and options."""
        options = [
            word
            for word, before in zip(said, ["", *said], strict=False)
            if not re.match("[-+][a-z]*o$", before)
        ]
        if name == "shift" or any(word == "--" or word[:1] not in ("-", "+") for word in options):
            self.state.arguments = self.gap("$@", why)

    def assign(self, raw: Raw, *, typed: bool = False) -> None:
        """Take an assignment."""
        match = assignment(raw)
        assert match is not None
        name = match[1]
        index = match[2]
        more = bool(match[3])
        first = raw.parts[0]
        rest = first.text[match.end() :]
        self.calculated(index or "", f"{name}{index}")
        if (
            index
            or typed
            or name in self.assumed
            or name == "IFS"
            or any(_begin(i) == "[" for i in raw.array or ())
        ):
            self.joined([Part("text", rest, False), *raw.parts[1:]])
            why = f"is set in a way that is not followed (line {self.line})"
            self.forget([name], why)
            if name in self.references:
                self.forget_all(why)
            return
        if rest.startswith("~"):
            self.homes.add(rest)
        value: list[Value]
        if raw.array is not None:
            value = [
                (w,) if isinstance(w, str) else w.pieces
                for item in raw.array
                for w in self.expand(item)
            ]
        else:
            value = [self.joined([Part("text", rest, False), *raw.parts[1:]])]
        held = self.state.variables.get(name)
        if name in self.kept and raw.array is None and not more and _argument(value[0]):
            return  # a script before this one says what its argument is
        if more and held is None and self.state.lost:
            held = self.gap(f"${name}", self.state.lost.why)
        if more and held is None and raw.array is None:
            self.defaults.setdefault(name, self.where)
        before: list[Value] = [(held,)] if isinstance(held, Gap) else held or []
        if more and raw.array is not None:
            value = [*before, *value]
        elif raw.array is None and not isinstance(held, Gap):
            value = [(*(before[0] if more and before else ()), *value[0]), *before[1:]]
        elif raw.array is None and more:
            value = [(*before[0], *value[0])]
        self.spend(sum(len(item) for item in value))
        self.state.variables[name] = value
        if names_secret(name):
            self.secrets.setdefault(name, []).extend(map(word_of, value))

    def declare(self, command: str, raws: Sequence[Raw], node: Command) -> None:
        """`export`, `readonly`, `declare`, `local`: plain forms are assignments."""
        options = "".join(
            raw.plain or "" for raw in raws if (raw.plain or "").startswith(("-", "+"))
        )
        typed = bool(re.search("[iulnA]", options))
        for raw in raws:
            match = assignment(raw)
            text = raw.plain or ""
            name = match[1] if match else text
            if text.startswith(("-", "+")):
                continue
            if not match and not NAMES.fullmatch(text):
                self.forget_all(f"is set by {node.text[:60]} (line {node.line})")
                continue
            if match:
                self.assign(raw, typed=typed or has_braces(raw))
            elif typed and name in self.state.variables:
                self.forget([name], f"is declared {options} (line {node.line})")
            if typed or command == "readonly" or "r" in options:
                self.assumed.add(name)
            if "n" in options:
                self.references.add(name)

    def either(
        self, name: str, found: Sequence[list[Value] | Gap | None], why: str
    ) -> list[Value] | Gap:
        """Return one of several values of a variable: what they begin with alike, and what some of
        them add.
        """
        if any(isinstance(one, Gap) and one.words is None for one in found):
            return self.gap(f"${name}", why)
        values: list[list[Value]] = [
            [(one,)] if isinstance(one, Gap) else [("",)] if one is None else one for one in found
        ]
        if all(len(items) == 1 for items in values):
            words = [word_of(items[0]) for items in values]
            start = min(words, key=lambda word: len(shown(word)))
            if isinstance(start, str) and all(_goes_on(word, start) for word in words):
                added = tuple(one for word in words for one in shown(word)[len(start) :].split())
                return [(start, " ", self.gap(f"${name}", why, words=added))]
        same = [items[0] for items in takewhile(_alike, zip(*values, strict=False))]
        rest = [item for items in values for item in items[len(same) :]]
        gap = self.gap(
            f"${name}", why, words=tuple(one for item in rest for one in words_in(word_of(item)))
        )
        return [*same, (gap,)] if same else gap


def either_function(
    node: Branches, defined: Sequence[dict[str, tuple[str, Function]]]
) -> dict[str, tuple[str, Function]]:
    """Functions behind branches: one that is another in each is made of all of them, of which one
    runs.
    """
    out: dict[str, tuple[str, Function]] = {}
    for name in dict.fromkeys(name for functions in defined for name in functions):
        found = [functions[name] for functions in defined if name in functions]
        different = list({id(function): (source, function) for source, function in found}.values())
        source, function = different[0]
        if len(different) > 1:
            bodies = [one.body for _, one in different]
            text = f"{name} under {node.text}"
            function = Function(
                node.line, name, [Branches(node.line, text, [], bodies, len(found) == len(defined))]
            )
        out[name] = source, function
    return out


def _naming(command: str, words: Sequence[Raw]) -> list[Raw]:
    """Return words of a command of the shell that name the variables which it sets."""
    plain = [raw.plain or "" for raw in words]
    if command in DECLARING or command == "unset":
        refers = any(re.match("-[A-Za-z]*n", text) for text in plain)
        return [_UNKNOWN] if refers else list(words)
    if command in ("printf", "wait"):
        option = "-v" if command == "printf" else "-p"
        return [words[at + 1] for at, text in enumerate(plain[:-1]) if text == option]
    if command == "getopts":
        return list(words[1:2])
    if command == "let":
        return [_UNKNOWN for raw in words if _sets_computed(raw)]
    taking = {"read": "dinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}.get(command)
    if taking is None:
        return []
    return [
        raw
        for raw, before in zip(words, ["", *plain], strict=False)
        if not re.match(f"-\\w*[{taking}]$", before)
    ]


def _computed_name(raw: Raw) -> bool:
    """Tell if the name in a word is not written there: `$1`, `"$1=$2"`, and not `A`, `"A=$2"` or
    `A[$1]`.
    """
    first = raw.parts[0] if raw.parts else None
    if first is None or all(part.kind == "text" for part in raw.parts):
        return False
    return first.kind != "text" or not re.match(r"[A-Za-z_]\w*(?:\[|\+?=)|-", first.text)


def _sets_computed(raw: Raw) -> bool:
    """Tell if arithmetic sets a variable whose name is not written in it, as `$1 += 2` does."""
    text = "".join(part.text if part.kind == "text" else "$x" for part in raw.parts)
    return sets_computed(text)


def _alike(items: tuple[Value, ...]) -> bool:
    return all(item == items[0] for item in items)


def _goes_on(word: Word, start: str) -> bool:
    """Return whether a text is another one with more words behind it."""
    rest = shown(word)[len(start) :]
    return (
        isinstance(word, str)
        and word.startswith(start)
        and (not rest or not start or rest[0].isspace())
    )


def _begin(raw: Raw) -> str:
    return (raw.parts[0].text[:1] if raw.parts and not raw.parts[0].quoted else "") or ""


def _argument(value: Value) -> bool:
    return (
        len(value) == 1
        and isinstance(value[0], Gap)
        and bool(re.fullmatch(r"\$\{?[1-9]\}?", value[0].text))
    )
