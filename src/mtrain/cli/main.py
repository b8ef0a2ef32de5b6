"""The command line: `mtrain [VERB] [KEY=VALUE ...]`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from mtrain import startup
from mtrain.config.compose.paths import config_dirs
from mtrain.errors import (
    STANDARD_OUTPUT,
    BadEnvironment,
    ConfigError,
    MtrainError,
    Problem,
    message,
    of_the_place,
    say_page,
)

# Scripts of `completion` call this verb; the pages do not list it.
COMPLETE = "__complete"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv`, by default that of this process; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        startup.begin()
    _open_closed_streams()
    # pydantic would ask every installed package for plug-ins: time, and code that nobody chose
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        return _answer(arguments)
    except BrokenPipeError:
        _drop_output()
        return 141


def _drop_output() -> None:
    """Redirect standard output to nowhere: the interpreter would write the rest at exit, and fail
    again.
    """
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code.

    Raises:
        MtrainError: the command is refused or fails.
    """
    from click.exceptions import Exit

    from mtrain.cli.parsing import folders_named, parse

    folders, arguments = folders_named(arguments)
    try:
        call = parse(arguments)
    except Exit as printed:
        return printed.exit_code
    from mtrain.launching.signals import stoppable

    startup.mark(startup.COMMAND)
    with config_dirs(folders), stoppable():
        return call.run()


def _answer(arguments: list[str]) -> int:
    """Run one command and print its error; return its exit code.

    Raises:
        BrokenPipeError: nobody reads the output.
    """
    try:
        if arguments[:1] == [COMPLETE]:
            from mtrain.cli.completion import answer

            return answer("".join(arguments[1:2]))
        return run(arguments)
    except KeyboardInterrupt as stop:
        _say(str(stop) or "interrupted")
        return getattr(stop, "exit_code", 130)
    except BrokenPipeError:
        raise
    except Exception as error:
        if "--debug" in arguments:
            _traceback()
        try:
            return _refused(error, arguments)
        except BrokenPipeError:
            raise
        except OSError as unwritten:
            # the report could not be written
            return _refused(unwritten, arguments)


def _refused(error: Exception, arguments: Sequence[str]) -> int:
    """Print what went wrong; return the exit code."""
    if getattr(error, "filename", None) == STANDARD_OUTPUT:
        _drop_output()
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        rule = f"a path of {len(str(error.filename))} letters is longer than this system takes"
        _say(Problem("MT002", "", None, rule, "a shorter path", "command line").render())
        return ConfigError.exit_code
    known = _gone() or of_the_place(error) or error
    if not isinstance(known, MtrainError):
        first = (str(known).strip().splitlines() or [""])[0]
        _say(f"unexpected {type(known).__name__}: {first}\nuse --debug for the traceback")
        return 1
    if "--json" in arguments and isinstance(known, ConfigError):
        from mtrain.cli.output import problem_report, say_json

        say_json(problem_report(known.problems, None))
    else:
        _say(message(known))
    return known.exit_code


def _gone() -> BadEnvironment | None:
    """Return an error if the working folder was removed, which may cause any other error."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return BadEnvironment("the working folder was removed", "  fix: cd into an existing folder")
    return None


def _open_closed_streams() -> None:
    """Redirect closed standard streams to nowhere: a file of the run would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _say(text: str) -> None:
    """Print on stderr; of the processes that a launcher such as torchrun started, only the first
    one does.
    """
    if _speaks():
        with suppress(OSError):
            say_page(text, error=True)


def _speaks() -> bool:
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def _traceback() -> None:
    import traceback

    if _speaks():
        traceback.print_exc()
