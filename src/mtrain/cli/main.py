"""The command line: `mtrain [VERB] [KEY=VALUE ...]`. Verbs are loaded only when they are used."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from mtrain import strict_json
from mtrain.cli.parsing import Call, folders_named
from mtrain.cli.parsing import parse as parse
from mtrain.cli.verbs import (
    ANSWERS,
    FLAGS,
    HELP,
    JSON_VERBS,
    OWN_WORDS,
    VERBS,
)
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
from mtrain.processes import without_collecting


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    # pydantic would ask every installed package for plug-ins: time, and code that nobody chose
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        return _answer(arguments)
    except BrokenPipeError:
        _drop_output()
        return 141


def _drop_output() -> None:
    """Send standard output nowhere: the interpreter would write the rest of it at exit, and fail
    again.
    """
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _answer(arguments: list[str]) -> int:
    """Run one command, and print what went wrong with it; return its exit code.

    Raises:
        BrokenPipeError: nobody reads what is printed.
    """
    try:
        named, arguments = folders_named(arguments)
        with config_dirs(named):
            return dispatch(parse(arguments))
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
        except OSError as unwritten:  # the report could not be written
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
        say_page(_json_report(known))
    else:
        _say(message(known))
    return known.exit_code


def _gone() -> BadEnvironment | None:
    """Return an error where the working folder was removed, which may be the cause of any other
    error.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return BadEnvironment(
            "the working folder is gone: it was removed", "  fix: cd into a folder that is there"
        )
    return None


def _open_closed_streams() -> None:
    """Standard streams that were closed lead nowhere from now on: a file of the run would get their
    numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def dispatch(call: Call) -> int:
    """Run a parsed command; returns its exit code."""
    if "--version" in call.flags:
        from mtrain import __version__

        say_page(f"mtrain {__version__}")
        return 0
    if "--help" in call.flags or _asks_for_help(call):
        from mtrain.cli.pages import page_of

        say_page(page_of(call.verb, call.arguments) if call.named else help_page())
        return 0
    as_json = "--json" in call.flags
    if "--multirun" in call.flags:
        return _many(call, as_json)
    if call.verb == "check" and "--all" in call.flags:
        from mtrain.cli import matrix

        return matrix.run(call.arguments, as_json=as_json)
    if call.verb == "check":
        with without_collecting():
            from mtrain.cli import check

            return check.run(call.arguments, as_json=as_json)
    if call.verb == "plan":
        return _plan(call, as_json)
    if call.verb == "show":
        from mtrain.cli import show

        return show.run(
            call.arguments,
            bare="--resolved" in call.flags,
            changed="--changed" in call.flags,
            as_json=as_json,
        )
    options = {"as_json": as_json} if call.verb in JSON_VERBS else {}
    if call.verb == "convert":
        options["megatron"] = "--megatron" in call.flags
    from mtrain.launching.signals import stoppable

    with stoppable():
        return _worker_verb(call.verb)(call.arguments, debug="--debug" in call.flags, **options)


def _one_answer(call: Call) -> None:
    """Raise ConfigError where flags of `plan` ask for several things, of which one
    would be given.
    """
    asked = [flag for flag in ANSWERS if flag in call.flags or flag in call.values]
    if "--json" in call.flags and asked == ["--draw"]:
        asked.append("--json")
    if len(asked) > 1:
        rule = f"{' and '.join(asked)}: plan answers one of them"
        raise ConfigError([Problem("MT010", "", None, rule, f"plan {asked[0]}", "command line")])


def _plan(call: Call, as_json: bool) -> int:
    """Return the plan of a configuration, or what one of its flags asks for."""
    if "--scale" in call.values or "--weak" in call.flags:
        return _worker_verb("plan_scale")(call)
    _one_answer(call)
    if "--compare" in call.values:
        from mtrain.cli import plan_compare

        return plan_compare.run(call.values["--compare"], call.arguments, as_json=as_json)
    for flag, module in (("--trace", "trace"), ("--calibrate", "calibrate")):
        if flag in call.flags:
            return _worker_verb(module)(call.arguments, as_json=as_json)
    with without_collecting():
        from mtrain.cli import plan

        draw = "--draw" in call.flags
        html = call.values.get("--html")
        return plan.run(call.arguments, as_json=as_json, draw=draw, html=html)


def _asks_for_help(call: Call) -> bool:
    """Return whether a verb that reads its own words was asked for its page."""
    own = call.arguments[: call.arguments.index("--")] if "--" in call.arguments else call.arguments
    return call.verb in OWN_WORDS and call.verb in VERBS and any(word in HELP for word in own)


def _many(call: Call, as_json: bool) -> int:
    """Run a verb once for each combination of swept values."""
    from mtrain.cli import multirun

    if call.verb == "check":
        return multirun.check(call.arguments, as_json=as_json)
    if call.verb != "train":
        rule = f"-m: train and check take several values; {call.verb} takes one run"
        raise ConfigError(
            [Problem("MT010", "", None, rule, f"{call.verb}, without -m", "command line")]
        )
    return multirun.train(call.arguments, main, debug="--debug" in call.flags, as_json=as_json)


def _worker_verb(verb: str) -> Callable[..., int]:
    from importlib import import_module

    run: Callable[..., int] = import_module(f"mtrain.cli.{verb.strip('_')}").run
    return run


def _json_report(error: ConfigError) -> str:
    from mtrain.cli.check import report

    return strict_json.dumps(report(error.problems, None), indent=2)


def help_page() -> str:
    """Return the page of --help: verbs, values, flags, examples."""
    from mtrain.cli.pages import PAGES, SETTINGS, command
    from mtrain.config.compose.paths import program
    from mtrain.config.schema.run import GROUPS

    examples = [example for verb in ("train", "check", "show") for example in PAGES[verb].examples]
    out = [f"usage: {program()} [VERB] [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAGS]", "", "verbs"]
    out += [f"  {name:<10} {text}" for name, text in VERBS.items()]
    out += [
        f"  `{program()} VERB --help` is a verb's own page",
        "",
        "values, and what they stand on",
        *(f"  {name:<15} {text}" for name, text in SETTINGS),
        f"  groups: {' '.join(GROUPS)}",
        "",
        "flags",
        *(f"  {name:<15} {text}" for name, text in FLAGS.items()),
        "",
        "examples",
        *(f"  {command(words)}\n      {text}" for words, text in examples),
        "",
        (
            "exit codes: 0 ok, 2 bad input, 3 environment, 4 damaged data, 5 training fault, 75"
            " preempted and resumable"
        ),
    ]
    return "\n".join(out)


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
