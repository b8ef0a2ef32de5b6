"""Rules as data: the codes that a rule raises, the keys that it reads, and whether it
opens files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mtrain.config.resolve.watch import touches
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Severity


@dataclass(frozen=True)
class Code:
    """Meaning of a code, as `explain CODE` prints it."""

    code: str
    summary: str = ""
    """One sentence. Empty: the docstring of the rule that raises it."""
    help: str = ""
    """What to do. Empty: to change one of the keys that the rule reads."""
    severity: Severity = "error"
    example: str = ""
    """A command line that raises it on a small machine without GPUs; empty where that takes files
    of one's own.
    """
    says: str = ""
    """A message of it, where there is no example to make one."""


Ask = Callable[[RunConfig], Iterator[Finding]]


@dataclass(frozen=True, eq=False)
class Rule:
    """One rule: a function with its codes and the keys that it reads."""

    name: str
    file: str
    """The module it stands in, as a path below the package."""
    codes: tuple[Code, ...]
    reads: tuple[str, ...]
    """Keys, the most important first; a section stands for all of its keys."""
    disk: bool
    """Whether it looks at files. Every other rule is a pure function of the configuration."""
    ask: Ask

    def __call__(self, run: RunConfig) -> Iterator[Finding]:
        """Return the findings; one with the code of a warning is a warning."""
        for found in self.ask(run):
            mild = any(code.severity == "warning" for code in self.codes if code.code == found.code)
            yield replace(found, severity="warning") if mild else found

    def reads_any(self, *keys: str) -> bool:
        """Return whether the rule reads one of `keys`, or a key of a section among them."""
        return touches(self.reads, keys)


def rule(*codes: Code, reads: str, disk: bool = False) -> Callable[[Ask], Rule]:
    """Make a rule of a function that yields findings with `codes` and reads only the keys in
    `reads`.
    """

    def made(ask: Ask) -> Rule:
        words = (ask.__doc__ or "").partition("\n")[0]
        said = tuple(code if code.summary else replace(code, summary=words) for code in codes)
        file = f"{ask.__module__.partition('.')[2].replace('.', '/')}.py"
        return Rule(ask.__name__, file, said, tuple(dict.fromkeys(reads.split())), disk, ask)

    return made
