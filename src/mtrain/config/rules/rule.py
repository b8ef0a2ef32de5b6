"""Rules as data: the codes they raise, the keys they read, and whether they read files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from mtrain.codes import Code, declare
from mtrain.config.resolve.watch import touches
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import RunConfig

__all__ = ["Ask", "Code", "Rule", "rule", "rules_in"]
Ask = Callable[[RunConfig], Iterator[Finding]]


@dataclass(frozen=True, eq=False)
class Rule:
    """A check of a configuration by one function."""

    name: str
    file: str
    """Its module, as a path below the package."""
    codes: tuple[Code, ...]
    reads: tuple[str, ...]
    """The keys that it reads, most important first; a section stands for all of its keys."""
    disk: bool
    """Whether it reads files. Every other rule is a pure function of the configuration."""
    ask: Ask

    def __call__(self, run: RunConfig) -> Iterator[Finding]:
        """Yield the findings; the code of a warning makes a warning."""
        warnings = {code.code for code in self.codes if code.severity == "warning"}
        for found in self.ask(run):
            yield replace(found, severity="warning") if found.code in warnings else found

    def reads_any(self, *keys: str) -> bool:
        """Return whether it reads one of `keys`, or a key of a section in them."""
        return touches(self.reads, keys)


def rule(*codes: Code, reads: str, disk: bool = False) -> Callable[[Ask], Rule]:
    """Make a rule of a function that yields findings with `codes` and reads only the keys in
    `reads`.

    The docstring of the function, `Cannot X because Y.`, is the text of a code without one.
    """

    def made(ask: Ask) -> Rule:
        words = " ".join(inspect.cleandoc(ask.__doc__ or "").partition("\n\n")[0].split())
        whole = tuple(code if code.text else replace(code, text=words) for code in codes)
        for code in whole:
            declare(code)
        file = f"{ask.__module__.partition('.')[2].replace('.', '/')}.py"
        return Rule(ask.__name__, file, whole, tuple(dict.fromkeys(reads.split())), disk, ask)

    return made


def rules_in(module: ModuleType) -> Iterator[Rule]:
    """Yield the rules of a module in their order: each on its own, or several in a tuple."""
    for value in vars(module).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Rule):
                yield each
