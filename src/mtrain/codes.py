"""Codes of problems: each says once what cannot be done and why.

A rule declares the codes that only rules raise. `codes.yaml` has those of files, the command line,
the schema, the machine, runs and imports: a message has the same words in a process that never
loads the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Severity = Literal["error", "warning"]
FILE = Path(__file__).with_name("codes.yaml")
WITHOUT_CODE = "MT001"
"""The code of problems that whoever raises them words whole."""


@dataclass(frozen=True)
class Code:
    """The meaning of a code: messages, `explain CODE` and the page of codes print it."""

    code: str
    text: str = ""
    """`Cannot X because Y.`, or `Cannot X.` if each problem has a cause of its own. Empty: the
    docstring of the rule that raises it.
    """
    help: str = ""
    """The advice. Empty: to change one of the keys that the rule reads."""
    severity: Severity = "error"
    example: str = ""
    """A command line that raises it on a small machine without GPUs; empty if that needs the user's
    files.
    """
    says: str = ""
    """A sample of the numbers, if no example can make one."""


PREDICATES = ("must", "is", "has", "needs", "cannot")
"""First words of a cause whose subject is the value: `must be at least 1`."""
_of_rules: dict[str, Code] = {}


def declare(code: Code) -> None:
    """Make the words of a rule's code known to the problems that it raises."""
    _of_rules.setdefault(code.code, code)


@cache
def outside_rules() -> Mapping[str, Code]:
    """Return the codes that are not only raised by rules."""
    return {code: Code(code, **row) for code, row in own_yaml(FILE).items()}


def own_yaml(path: Path) -> Any:
    """Return the content of a YAML file of this package."""
    # A command that finds no problem needs no such file, nor the YAML package.
    import yaml

    # libyaml reads a file in a tenth of the time, but PyYAML may be built without it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)


def sentence(code: str, detail: str) -> str:
    """Return `cannot X because Y (numbers)`: the words of a code, and the detail of a problem."""
    known = _of_rules.get(code) or outside_rules().get(code)
    if known is None or code == WITHOUT_CODE:
        return detail
    # A rule of a plug-in may word its problems itself.
    if not known.text.startswith("Cannot ") and detail:
        return detail
    text = known.text[0].lower() + known.text[1:].removesuffix(".")
    if not detail:
        return text
    # A detail that says itself what cannot be done is more exact than its code.
    if detail.startswith("cannot "):
        return detail
    if " because " in text:
        return f"{text} ({detail})"
    # `ARGUMENT: cause` of a command line, and causes that are predicates, become a sentence.
    named, colon, cause = detail.partition(": ")
    if not colon or " " in named:
        named = ""
        cause = detail
    subject = "it" if cause.partition(" ")[0] in PREDICATES else ""
    return " ".join(filter(None, (text, named, "because", subject, cause)))
