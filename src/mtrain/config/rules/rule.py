"""Rules as data: the codes they raise, the keys they read, and whether they read files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mtrain.config.resolve.watch import touches
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Severity


@dataclass(frozen=True)
class Code:
    """The meaning of a code; `explain CODE` prints it."""

    code: str
    summary: str = ""
    """One sentence. Empty: the docstring of the rule that raises it."""
    help: str = ""
    """The advice. Empty: to change one of the keys that the rule reads."""
    severity: Severity = "error"
    example: str = ""
    """A command line that raises it on a small machine without GPUs; empty if that needs the user's
    files.
    """
    says: str = ""
    """A sample message, if no example can make one."""


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
        for found in self.ask(run):
            mild = any(code.severity == "warning" for code in self.codes if code.code == found.code)
            yield replace(found, severity="warning") if mild else found

    def reads_any(self, *keys: str) -> bool:
        """Return whether it reads one of `keys`, or a key of a section in them."""
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
