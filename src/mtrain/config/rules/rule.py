"""Rules as data: the codes they raise, the keys they read, and whether they read files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType

from mtrain.config.resolve.watch import touches
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Code, declare, outside_rules

__all__ = ["Ask", "Code", "Rule", "rule", "rules_in"]
Ask = Callable[[RunConfig], Iterator[Finding]]


@dataclass(frozen=True, eq=False)
class Rule:
    """A check of a configuration by one function."""

    name: str
    file: str
    """Its module, as a path below the package."""
    own: tuple[Code, ...]
    """The codes that only rules raise."""
    shared: tuple[str, ...]
    """The codes of `codes.yaml` that commands and ranks raise as well."""
    reads: tuple[str, ...]
    """The keys that it reads, most important first; a section means all of its keys."""
    disk: bool
    """True if the rule reads files. Every other rule is a pure function of the configuration."""
    ask: Ask

    def __call__(self, run: RunConfig) -> Iterator[Finding]:
        """Yield the findings; the code of a warning makes a warning."""
        for found in self.ask(run):
            yield replace(found, severity="warning") if found.code in self._warnings else found

    @cached_property
    def codes(self) -> tuple[Code, ...]:
        """Return every code that it raises."""
        # Few configurations break a rule, and only those need the file of codes.
        rows = outside_rules() if self.shared else {}
        return (*self.own, *(rows[code] for code in self.shared))

    @cached_property
    def _warnings(self) -> frozenset[str]:
        return frozenset(code.code for code in self.codes if code.severity == "warning")

    def reads_any(self, *keys: str) -> bool:
        """Return whether it reads one of `keys`, or a key of a section in them."""
        return touches(self.reads, keys)


def rule(*codes: Code | str, reads: str, disk: bool = False) -> Callable[[Ask], Rule]:
    """Make a rule of a function that yields findings with `codes` and reads only the keys in
    `reads`.

    The docstring of the function, `Cannot X because Y.`, is the text of a code without one. A code
    that is not only raised by rules is a row of `codes.yaml`, and stands here as its name.
    """

    def made(ask: Ask) -> Rule:
        words = " ".join(inspect.cleandoc(ask.__doc__ or "").partition("\n\n")[0].split())
        given = [code for code in codes if isinstance(code, Code)]
        own = tuple(code if code.text else replace(code, text=words) for code in given)
        for code in own:
            declare(code)
        shared = tuple(code for code in codes if isinstance(code, str))
        file = f"{ask.__module__.partition('.')[2].replace('.', '/')}.py"
        keys = tuple(dict.fromkeys(reads.split()))
        return Rule(ask.__name__, file, own, shared, keys, disk, ask)

    return made


def rules_in(module: ModuleType) -> Iterator[Rule]:
    """Yield the rules of a module in their order: each on its own, or several in a tuple."""
    for value in vars(module).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Rule):
                yield each
