"""Where a problem's code is raised, read from the source: the function's own words and the text of its rule.

The source is parsed and never imported: what raises a code may need torch, and whoever asks what it means has no time
for that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mtrain.config.keys import field_of

RAISING = ("Finding", "Problem", "refuse", "problem")
"""Calls that make a problem."""
MAX_RULES = 8


@dataclass(frozen=True)
class Place:
    """One function that raises a code."""

    file: str
    function: str
    words: str
    """The first paragraph of its docstring, or of what it stands in."""
    key: str
    """The key that the problem is about; empty where it is about no single one."""
    rules: tuple[str, ...]
    """What the problem says, with `{name}` for what is filled in."""
    fixes: tuple[str, ...]
    """Other keys that the function speaks of: what it looks at, and what it proposes to change."""
    severity: str


Owner = ast.Module | ast.ClassDef | ast.FunctionDef


class _Function:
    """A function with everything that stands in it, functions inside it left out."""

    def __init__(self, node: ast.FunctionDef, owners: list[Owner]) -> None:
        self.node, self.owners = node, owners
        self.inside = list(_own(node))
        self.calls = [n for n in self.inside if isinstance(n, ast.Call)]
        self.raising = sorted((c for c in self.calls if _name(c.func) in RAISING), key=lambda c: c.lineno)
        self.strings = {n.value for n in self.inside if isinstance(n, ast.Constant) and isinstance(n.value, str)}

    @property
    def words(self) -> str:
        """What it says of itself, or those it stands in."""
        texts = [ast.get_docstring(self.node), *(ast.get_docstring(owner) for owner in reversed(self.owners))]
        return " ".join(next((text for text in texts if text), "").split("\n\n")[0].split())

    def rules_of(self, call: ast.Call) -> Iterator[str]:
        """The texts of a problem: the first argument that can be a sentence."""
        for argument in call.args:
            nodes = self._assigned(argument.id, call) if isinstance(argument, ast.Name) else [argument]
            texts = [text for node in nodes for part in _branches(node) if " " in (text := _template(part))]
            if texts:
                yield from texts
                return

    def _assigned(self, name: str, call: ast.Call) -> list[ast.expr]:
        """What a name was given since the problem before this one."""
        before = max((c.lineno for c in self.raising if c.lineno < call.lineno), default=0)
        found = [n for n in self.inside if isinstance(n, ast.Assign) and any(_name(t) == name for t in n.targets)]
        near = [n.value for n in found if before < n.lineno <= call.lineno]
        return near or [n.value for n in found if n.lineno <= call.lineno][-1:]


def raised_in(file: Path, shown: str, code: str) -> list[Place]:
    """The places of a file that raise a code; `shown` is what the file is called."""
    functions = _functions(file)
    return [_place(function, functions, shown, code) for function in functions if code in function.strings]


def _place(function: _Function, functions: tuple[_Function, ...], shown: str, code: str) -> Place:
    direct = [call for call in function.raising if code in _values(call)]
    holder = function
    calls = direct
    if not direct:  # the code is handed to a function that makes the problem, or stands in a list
        handed = {_name(call.func) for call in function.calls if code in _values(call)}
        holder = next((f for f in functions if f.node.name in handed and f.raising), function)
        calls = holder.raising
    rules = [rule for call in calls for rule in holder.rules_of(call)]
    if not rules:  # the sentence is handed to it
        asking = [(f, call) for f in functions for call in f.calls if _name(call.func) == holder.node.name]
        rules = [rule for f, call in asking for rule in f.rules_of(call)]
    beside = [v for part in _together(function, code) for v in part if _is_key(v)]
    about = next((v for call in direct for v in _values(call) if _is_key(v)), "") or next(iter(beside), "")
    fixes = sorted(v for v in function.strings if _is_key(v) and v != about)
    severity = "warning" if any("warning" in _values(call) for call in calls) else "error"
    unique = tuple(dict.fromkeys(rules))[:MAX_RULES]
    return Place(shown, function.node.name, function.words, about, unique, tuple(fixes), severity)


@cache
def _functions(file: Path) -> tuple[_Function, ...]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    out: list[_Function] = []

    def walk(node: ast.AST, owners: list[Owner]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                out.append(_Function(child, owners))
            walk(child, [*owners, child] if isinstance(child, ast.ClassDef | ast.FunctionDef) else owners)

    walk(tree, [tree])
    return tuple(out)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _own(child)


def _together(function: _Function, code: str) -> Iterator[list[str]]:
    """The strings that stand in one tuple or call with a code."""
    for node in function.inside:
        parts = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        values = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
        if code in values:
            yield values


def _values(call: ast.Call) -> list[str]:
    parts = [*call.args, *(k.value for k in call.keywords)]
    return [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def _branches(node: ast.expr) -> list[ast.expr]:
    return [*_branches(node.body), *_branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _template(node: ast.expr) -> str:
    """A text, with `{name}` where something is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{_name(node.value)}}}" if _name(node.value) else "{...}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_key(value: str) -> bool:
    return "." in value and field_of(value) is not None
