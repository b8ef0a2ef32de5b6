"""Codes of problems, problems of a configuration as data, and the errors, each with its exit code.

A code says once what cannot be done and why.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TextIO

STANDARD_OUTPUT = "standard output"
"""The name of standard output in an error, in the place of a file's."""
OF_THE_PLACE = {
    errno.EACCES: "set permissions that let this user in, or use another place",
    errno.EPERM: "set permissions that let this user in, or use another place",
    errno.EROFS: "use a place that can be written",
    errno.ENOSPC: "free some space, or use another place",
    errno.EDQUOT: "get a larger quota, or use another place",
    errno.EIO: "use another disk: this one, or the network to it, fails",
    errno.ESTALE: "try again: another machine has replaced the file on a shared disk",
    errno.EMFILE: "let this process open more files: ulimit -n",
    errno.ENFILE: "close files on this machine, where too many are open",
    errno.ENOMEM: "free some memory, or make the run smaller",
    errno.EAGAIN: "let this user have more processes and threads: ulimit -u",
}
"""System errors caused by the place where a command runs -> the fix."""

_VERBS = (
    "add allow bring build change choose close copy correct create cut delete did drop edit "
    "end enlarge export finish free get give import indent install keep leave let list "
    "lower make move name omit pass put quote raise read remove rename repeat replace run "
    "save say see set shorten split start state sweep take tokenize train try turn unset "
    "use wait write"
)
VERBS = frozenset(_VERBS.split())
"""First words of advice; any other fix is a setting, a flag or a command to use."""
MAX_SHOWN = 160
"""Characters of a value that a message shows."""
MAX_PROBLEMS = 50
"""Problems that one error holds."""


@dataclass(frozen=True, slots=True)
class Related:
    """Another key of a broken rule."""

    path: str
    value: object
    source: str
    """Origin of the key's value; empty if unknown."""

    def render(self) -> str:
        """Return the key as `parallel.pp=4 (command line)`."""
        source = f" ({self.source})" if self.source else ""
        return f"{self.path}={shortened(self.value)}{source}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration, complete enough to be corrected without reading code."""

    code: str
    """Stable code such as `MT101`."""
    path: str
    """Dotted key, such as `parallel.tp`; empty for a problem of the whole configuration."""
    value: object
    """The value found at `path`."""
    detail: str
    """The numbers of this configuration, or the cause where the code's words do not have it."""
    fix: str
    """Correction; for an override in the form `key=value`."""
    source: str = ""
    """Origin of the key's value: `conf/model/llama3_8b.yaml:7`, `command line`, `default`."""
    severity: Severity = "error"
    related: tuple[Related, ...] = ()
    """The other keys of the rule."""

    @property
    def rule(self) -> str:
        """Return the problem as `cannot X because Y (numbers)`, in the words of its code."""
        return sentence(self.code, self.detail)

    def message(self) -> str:
        """Return `KEY=VALUE: cannot X because Y (numbers). Use A or B.`"""
        # Without a value, an MT00x problem is of a file that could not be parsed, and an unknown
        # key was only named.
        unread = self.value is None and self.code.startswith(("MT00", "MT012"))
        if not self.path:
            subject = self.source
        elif unread:
            subject = self.path
        else:
            subject = f"{self.path}={shortened(self.value)}"
        head = f"{subject}: {self.rule}" if subject else self.rule
        return f"{_ended(head)} {advice(self.fix)}" if self.fix else _ended(head)

    def render(self) -> str:
        """Return the message with its code, and a second line of who set which key."""
        origins = []
        if self.path and self.source:
            origins.append(f"origin: {self.source}")
        if self.related:
            origins.append(f"with {', '.join(key.render() for key in self.related)}")
        head = visible(f"{self.severity}[{self.code}] {self.message()}")
        return f"{head}\n  {visible('; '.join(origins))}" if origins else head


def advice(fix: str) -> str:
    """Return a fix as a sentence: `Use A or B.`, or the advice itself."""
    first = fix.partition(" ")[0].rstrip(",")
    return _ended(f"{fix[0].upper()}{fix[1:]}" if first in VERBS else f"Use {fix}")


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shortened(value: object) -> str:
    """Return a value as YAML spells it, cut where it is long."""
    return cut(show(value))


def cut(text: str) -> str:
    """Return the start of a text."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def visible(text: str) -> str:
    """Return `text` as one safe line for a terminal, with escapes for unprintable characters."""
    return "".join(c if c.isprintable() else _code(ord(c)) for c in text)


def _code(number: int) -> str:
    if number < 256:
        return f"\\x{number:02x}"
    if number < 1 << 16:
        return f"\\u{number:04x}"
    return f"\\U{number:08x}"


def in_a_line(text: str) -> str:
    """Return `text` as one line, with line breaks and tabs escaped as in a string; `visible`
    escapes the rest.
    """
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def printable(text: str) -> str:
    """Return `text` of several lines, each as `visible` shows it; tabs stay."""
    lines = (line.removesuffix("\r").split("\t") for line in text.split("\n"))
    return "\n".join("\t".join(map(visible, parts)) for parts in lines)


def say(*lines: str, error: bool = False) -> None:
    """Print each text as one line: no value in it can end a line or move the cursor."""
    _put("\n".join(map(visible, lines)), sys.stderr if error else sys.stdout)


listeners: list[Callable[[str], None]] = []
"""Functions that get the text of each warning of this process, in any of its threads."""


def warn(text: str) -> None:
    """Print a warning; if it cannot be printed, ignore that, since no warning ends a run."""
    for hear in tuple(listeners):
        hear(text)
    with suppress(OSError, ValueError):
        say(f"warning: {text}", error=True)


def say_page(text: str, *, error: bool = False) -> None:
    """Print a text of several lines, such as a file, with unprintable characters escaped."""
    _put(printable(text.removesuffix("\n")), sys.stderr if error else sys.stdout)


Styled = Sequence[tuple[str, str]]
"""A line as pairs of a text and the name of a style; an empty name means no style."""
STYLES = {"bold": "1", "dim": "2", "loss": "1;32"}


def say_styled(*lines: Styled) -> None:
    """Print lines on a terminal in the styles of their parts, elsewhere as plain text."""
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    out = []
    for line in lines:
        parts = ((visible(text), STYLES.get(style, "") if colours else "") for text, style in line)
        out.append(
            "".join(
                f"\x1b[{code}m{text}\x1b[0m" if code and text else text for text, code in parts
            ).rstrip()
        )
    _put("\n".join(out), sys.stdout)


def _put(text: str, stream: TextIO) -> None:
    """Print a text, with escapes for characters that the stream's encoding lacks.

    Raises:
        OSError: the stream cannot be written; the error names it in place of a file.
    """
    encoding = stream.encoding or "utf-8"
    try:
        # Flush here: an error at the end of the process would have no message.
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    # A reader that closed the pipe, such as `head`, is no fault of this machine.
    except BrokenPipeError:
        raise
    except OSError as error:
        name = STANDARD_OUTPUT if stream is sys.stdout else "standard error"
        raise OSError(error.errno, error.strerror or "cannot be written", name) from None


def show(value: object) -> str:
    """Return a configuration value as YAML would spell it, in one line."""
    if value is None:
        return "null"
    # Before other types: True is an int, too.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value else "''"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {show(inner)}' for key, inner in value.items())}}}"
    return str(value)


class MtrainError(Exception):
    """Base of every error that mtrain raises on purpose; `exit_code` is the command's exit code.

    Its text is the lines that it is given, each as `visible` shows it: no name and no file's
    content ends a line.
    """

    exit_code = 1
    shared = False
    """True if every rank raises the error, so that only one rank per machine prints it."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(visible, lines)))


class ConfigError(MtrainError):
    """The configuration cannot be run.

    Holds every problem found, up to a limit, and not only the first.
    """

    exit_code = 2

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem("MT001", "", None, problems, "")]
        self.problems = tuple(problems)
        if len(self.problems) > MAX_PROBLEMS:
            rule = f"there are more than {MAX_PROBLEMS} problems, and the rest is not validated"
            self.problems = (
                *self.problems[:MAX_PROBLEMS],
                Problem("MT005", "", None, rule, "correct these first"),
            )
        super().__init__(*(line for p in self.problems for line in p.render().split("\n")))

    @classmethod
    def of(cls, code: str, path: str, value: object, rule: str, fix: str, source: str = "") -> Self:
        """Return the error of a single problem."""
        return cls([Problem(code, path, value, rule, fix, source)])


class CorruptInput(ConfigError):
    """Every problem is of a damaged file."""

    exit_code = 4


class BadPlace(ConfigError):
    """Every problem is of a folder that the run may not write on this machine."""

    exit_code = 3


class BadEnvironment(MtrainError):
    """The configuration is valid, but this machine, or the software on it, cannot run it."""

    exit_code = 3


NO_MEMORY = re.compile(
    r"cannot allocate memory|can't allocate memory|std::bad_alloc|not enough memory", re.IGNORECASE
)
"""Texts of errors of a process that gets no more host memory."""


def of_the_place(error: BaseException) -> BadEnvironment | None:
    """Return a system error as a sentence if the place is at fault: full, closed to this user, or
    failing.

    Every error of writing standard output counts as one; None: the cause is elsewhere.
    """
    # Python raises it without a number of the system.
    if isinstance(error, MemoryError):
        return BadEnvironment(
            "this process got no more memory", f"  fix: {OF_THE_PLACE[errno.ENOMEM]}"
        )
    if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
        return None
    on_output = error.filename == STANDARD_OUTPUT
    number = error.errno or 0
    if number not in OF_THE_PLACE and not on_output:
        return None
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    fix = OF_THE_PLACE.get(number, "use a standard output that can be written")
    return BadEnvironment(f"{where}{error.strerror or type(error).__name__}", f"  fix: {fix}")


class CorruptData(MtrainError):
    """Data or a checkpoint is damaged."""

    exit_code = 4


class TrainingError(MtrainError):
    """Training itself failed: a rank died, or the loss is not a number."""

    exit_code = 5
    rank: int | None = None
    """The rank at fault, if the rank that raises the error knows of one."""
    alert = "failed"
    """The name of the alert that it raises, with `log.alerts`."""


class DeviceFault(TrainingError):
    """A device computes or keeps wrong numbers; no restart may use it again."""

    shared = True

    @classmethod
    def of(cls, text: str, rank: int | None) -> Self:
        """Return the error of all ranks that names one of them, if it is known."""
        error = cls(text)
        error.rank = rank
        return error


class Preempted(MtrainError):
    """Stopped on request after a committed checkpoint; the run can be resumed."""

    exit_code = 75


def message(error: MtrainError) -> str:
    """Return an error as it is printed: every problem, and the number of them."""
    if not isinstance(error, ConfigError):
        return str(error)
    problems = error.problems
    lines = [problem.render() for problem in problems]
    errors = sum(problem.severity == "error" for problem in problems)
    warnings = len(problems) - errors
    tail = f"{errors} problem{'s' if errors != 1 else ''}"
    if warnings:
        tail += f", {warnings} warning{'s' if warnings != 1 else ''}"
    return "\n".join([*lines, tail])


Severity = Literal["error", "warning"]
CODES_FILE = Path(__file__).with_name("codes.yaml")
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
    """A command line that raises it on a machine without GPUs; empty if users' files are needed."""
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
    return {code: Code(code, **row) for code, row in own_yaml(CODES_FILE).items()}


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
