"""Effects of commands on a script's variables: assignments count, others are forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from mtrain.recipes.secrets import names_secret
from mtrain.recipes.shell.expansion import Expander, has_braces, sets_computed
from mtrain.recipes.shell.gaps import Gap, Value, Word, pieces_of, shown, word_of, words_in
from mtrain.recipes.shell.lexer import Part, Raw
from mtrain.recipes.shell.statements import (
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
"""Commands that set variables named by their words."""
_ANY = frozenset(
    ["eval", "source", ".", "command", "builtin", "shift", "set", "alias", "enable", "shopt"]
)
"""Commands that may set any variable, or change the meaning of words."""
NAMES = re.compile(r"[A-Za-z_]\w*")
_SETS_INSIDE = re.compile(
    r"\$\(\([^)]*(?:\+\+|--|<<=|>>=|[^=!<>]=[^=])|\$\{\w+:?=|\[[^]]*(?:\+\+|--)"
)

_UNKNOWN = Raw([Part("variable", "", False)])
"""An unknown name."""


class Effects(Expander):
    """An expander that applies assignments, and forgets variables that other commands may set."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, tuple[str, Function]] = {}
        """Name -> the file of a function, and its statements."""
        self.secrets: dict[str, list[Word]] = {}
        """Every value that variables with the name of a secret have had."""
        self.kept: set[str] = set()
        """Variables of earlier scripts, which the arguments of this one do not change."""
        self.references: set[str] = set()
        """Names that refer to other variables."""
        self.assumed: set[str] = set()
        """Names with other assignments: integers, references, one case of letters."""

    def forget(self, names: Iterable[str], why: str) -> None:
        """Make variables unknown from here on, and all if a name is a reference."""
        forgotten = dict.fromkeys(names)
        super().forget(forgotten, why)
        # a name reference sets the variable that it refers to, whatever that is
        if not self.references.isdisjoint(forgotten.keys()):
            self.forget_all(why)

    def forget_set(self, names: Iterable[str], body: Sequence[Node], why: str) -> None:
        """Forget the variables that statements, and the functions that they call, may set."""
        self.forget(names, why)
        bodies = [body]
        seen = set[str]()
        while bodies:
            for command in commands_in(bodies.pop()):
                self.spend(len(command.text))
                if isinstance(command, Loop):
                    self.forget(command.names, why)
                    continue
                for match in filter(None, map(assignment, command.words)):
                    self.forget([match[1]], why)
                    self.calculated(match[2] or "", f"{match[1]}{match[2]}")
                first = next((raw for raw in command.words if not assignment(raw)), Raw())
                name = first.plain or ""
                if _SETS_INSIDE.search(command.text) or name in (*SETTING, *DECLARING):
                    self.forget(NAMES.findall(command.text), why)
                arguments = list[Raw]()
                if name:
                    place = next(i for i, raw in enumerate(command.words) if raw is first)
                    arguments = command.words[place + 1 :]
                if any(map(_computed_name, _naming(name, arguments))):
                    self.forget_all(why)
                # once for each function: functions may call each other
                if name in self.functions and name not in seen:
                    seen.add(name)
                    bodies.append(self.functions[name][1].body)
                # a command with a computed name may be any command
                hidden = any(part.kind != "text" or part.quoted for part in first.parts)
                if hidden or name in _ANY:
                    self.forget_all(why)

    def set_arguments(self, name: str, words: list[str], why: str) -> None:
        """Apply `set` and `shift`, which change the arguments and the options."""
        # `set -o NAME`: the word after -o is no argument
        options = [
            word
            for word, before in zip(words, ["", *words], strict=False)
            if not re.match("[-+][a-z]*o$", before)
        ]
        # `set -e` leaves the arguments as they are; `set -- a b` replaces them
        if name == "shift" or any(word == "--" or word[:1] not in ("-", "+") for word in options):
            self.state.arguments = self.gap("$@", why)

    def assign(self, raw: Raw, *, typed: bool = False) -> None:
        """Apply an assignment."""
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
            or any(_first_letter(i) == "[" for i in raw.array or ())
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
            value = [pieces_of(word) for item in raw.array for word in self.expand(item)]
        else:
            value = [self.joined([Part("text", rest, False), *raw.parts[1:]])]
        held = self.state.variables.get(name)
        if name in self.kept and raw.array is None and not more and _argument(value[0]):
            return  # an earlier script set the variable that this argument would set
        # an earlier statement that was not followed may have set it
        if more and held is None and self.state.lost:
            held = self.gap(f"${name}", self.state.lost.why)
        # `A+=x` of a variable that the script never sets appends to the environment's
        if more and held is None and raw.array is None:
            self.defaults.setdefault(name, self.where)
        before: list[Value] = [(held,)] if isinstance(held, Gap) else held or []
        if more and raw.array is not None:
            value = [*before, *value]
        elif raw.array is None and not isinstance(held, Gap):
            value = [(*(before[0] if more and before else ()), *value[0]), *before[1:]]
        elif raw.array is None and more:
            value = [(*before[0], *value[0])]
        # each `+=` copies the whole value
        self.spend(sum(len(item) for item in value))
        self.state.variables[name] = value
        if names_secret(name):
            self.secrets.setdefault(name, []).extend(map(word_of, value))

    def declare(self, command: str, raws: Sequence[Raw], node: Command) -> None:
        """Apply `export`, `readonly`, `declare`, `local`: plain forms are assignments."""
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
            # later assignments to it fail, or are converted
            if typed or command == "readonly" or "r" in options:
                self.assumed.add(name)
            # declare -n: the name refers to another variable
            if "n" in options:
                self.references.add(name)

    def either(
        self, name: str, choices: Sequence[list[Value] | Gap | None], why: str
    ) -> list[Value] | Gap:
        """Return one of several values: their common beginning, and a gap with added words."""
        if any(isinstance(one, Gap) and one.words is None for one in choices):
            return self.gap(f"${name}", why)
        values = [_items(one) for one in choices]
        if all(len(items) == 1 for items in values):
            words = [word_of(items[0]) for items in values]
            # the usual `A="$A --flag"` in a branch: the beginning is certain
            start = min(words, key=lambda word: len(shown(word)))
            if isinstance(start, str) and all(_extends(word, start) for word in words):
                added = tuple(one for word in words for one in shown(word)[len(start) :].split())
                return [(start, " ", self.gap(f"${name}", why, words=added))]
        # arrays with items added at their end in some branches
        same = [items[0] for items in takewhile(_alike, zip(*values, strict=False))]
        rest = [item for items in values for item in items[len(same) :]]
        gap = self.gap(
            f"${name}", why, words=tuple(one for item in rest for one in words_in(word_of(item)))
        )
        return [*same, (gap,)] if same else gap


def either_function(
    node: Branches, defined: Sequence[dict[str, tuple[str, Function]]]
) -> dict[str, tuple[str, Function]]:
    """Return the functions after branches, with a branch of all forms if they differ."""
    out: dict[str, tuple[str, Function]] = {}
    for name in dict.fromkeys(name for functions in defined for name in functions):
        forms = [functions[name] for functions in defined if name in functions]
        different = list({id(function): (source, function) for source, function in forms}.values())
        source, function = different[0]
        if len(different) > 1:
            bodies = [one.body for _, one in different]
            text = f"{name} under {node.text}"
            function = Function(
                node.line, name, [Branches(node.line, text, [], bodies, len(forms) == len(defined))]
            )
        out[name] = source, function
    return out


def _items(value: list[Value] | Gap | None) -> list[Value]:
    if value is None:
        return [("",)]
    return [(value,)] if isinstance(value, Gap) else value


def _naming(command: str, words: Sequence[Raw]) -> list[Raw]:
    """Return the words of a shell command that name the variables which it sets."""
    plain = [raw.plain or "" for raw in words]
    if command in DECLARING or command == "unset":
        refers = any(re.match("-[A-Za-z]*n", text) for text in plain)
        return [_UNKNOWN] if refers else list(words)
    if command in ("printf", "wait"):
        # printf -v NAME and wait -p NAME set a variable
        option = "-v" if command == "printf" else "-p"
        return [words[at + 1] for at, text in enumerate(plain[:-1]) if text == option]
    if command == "getopts":
        return list(words[1:2])
    if command == "let":
        return [_UNKNOWN for raw in words if _sets_computed(raw)]
    # options with a value, which is no name of a variable
    taking = {"read": "dinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}.get(command)
    if taking is None:
        return []
    return [
        raw
        for raw, before in zip(words, ["", *plain], strict=False)
        if not re.match(f"-\\w*[{taking}]$", before)
    ]


def _computed_name(raw: Raw) -> bool:
    """Return whether the name in a word is computed, as in `$1` or `"$1=$2"`, not in `A[$1]`."""
    first = raw.parts[0] if raw.parts else None
    if first is None or all(part.kind == "text" for part in raw.parts):
        return False
    return first.kind != "text" or not re.match(r"[A-Za-z_]\w*(?:\[|\+?=)|-", first.text)


def _sets_computed(raw: Raw) -> bool:
    """Return whether arithmetic sets a variable with a computed name, as `$1 += 2` does."""
    text = "".join(part.text if part.kind == "text" else "$x" for part in raw.parts)
    return sets_computed(text)


def _alike(items: tuple[Value, ...]) -> bool:
    return all(item == items[0] for item in items)


def _extends(word: Word, start: str) -> bool:
    """Return whether a text is `start`, or `start` with more words after it."""
    rest = shown(word)[len(start) :]
    return (
        isinstance(word, str)
        and word.startswith(start)
        and (not rest or not start or rest[0].isspace())
    )


def _first_letter(raw: Raw) -> str:
    return (raw.parts[0].text[:1] if raw.parts and not raw.parts[0].quoted else "") or ""


def _argument(value: Value) -> bool:
    return (
        len(value) == 1
        and isinstance(value[0], Gap)
        and bool(re.fullmatch(r"\$\{?[1-9]\}?", value[0].text))
    )
