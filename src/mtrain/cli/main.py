"""The command line: `mtrain [VERB] [KEY=VALUE ...]`, with words and flags in any order.

click parses the flags of a verb. This module finds the verb, puts it first, and names what the
user may have meant by a word that no verb takes.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Never

import click
from click.exceptions import Exit

from mtrain import startup
from mtrain.cli.command import (
    DEBUG,
    HELP,
    SETTINGS,
    SHARED,
    Paged,
    Subverbs,
    Valued,
    Verb,
    example_lines,
)
from mtrain.cli.output import refusal
from mtrain.cli.verbs import NAMES, command_of, commands
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import config_dirs, group_names, program
from mtrain.errors import (
    MAX_PROBLEMS,
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
    """Redirect standard output to nowhere: the interpreter would write the rest at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code.

    Raises:
        MtrainError: the command is refused or fails.
    """
    from click.exceptions import Exit

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
    """Print on stderr, from the first of the processes that another launcher started."""
    if _speaks():
        with suppress(OSError):
            say_page(text, error=True)


def _speaks() -> bool:
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def _traceback() -> None:
    import traceback

    if _speaks():
        traceback.print_exc()


CONFIG_DIR = "--config-dir"
# words in the place of a verb that mean the flag of their name
WORDS = ("help", "version")
FLAGS = {
    f"{CONFIG_DIR} DIR": "a folder of your own choices, as DIR/model/mine.yaml; or MTRAIN_CONF",
    "--json": "print JSON for a machine, if the page of the verb lists it",
    "--debug": DEBUG,
    "-h, --help": "print a page",
    "--version": "print the version",
}
EXIT_CODES = (
    "exit codes: 0 ok, 2 bad input, 3 environment, 4 damaged data, 5 training fault, 75 preempted"
    " and resumable"
)
# The subverbs of this verb take `--name VALUE` for `name=VALUE`.
READS_FLAGS = "data"


@dataclass
class Call:
    """A verb and the arguments of its function."""

    verb: str
    """The names of the verb and of its subverb."""
    arguments: dict[str, Any]
    command: Verb = field(compare=False, repr=False)

    @property
    def words(self) -> list[str]:
        """Return the words that are not flags of the verb."""
        words: list[str] = self.arguments["words"]
        return words

    def run(self) -> int:
        """Run the verb; return the exit code."""
        # An import makes millions of objects that stay: collecting garbage meanwhile finds none.
        with without_collecting():
            function = resolve_name(f"mtrain.cli.{self.command.declared.runs}")
        code: int = function(**self.arguments)
        return code


def folders_named(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders of `--config-dir DIR`, which may be repeated, and the other arguments.

    Raises:
        ConfigError: a folder is missing.
    """
    folders: list[str] = []
    others: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if flag != CONFIG_DIR:
            others.append(word)
        elif equals or queue:
            folders.append(value if equals else queue.pop(0))
        else:
            raise refusal(f"{CONFIG_DIR}: needs a folder", f"{CONFIG_DIR} DIR")
    return folders, others


def parse(arguments: Sequence[str]) -> Call:
    """Parse a command line.

    Raises:
        ConfigError: a word that is no verb, or flags that do not exist or lack a value.
        click.exceptions.Exit: a page or the version was printed instead.
    """
    # Words after `--` are the command line of another program: nothing in them is a verb or a flag
    # of ours.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = list(arguments[:end])
    verb, place = _verb_in(own)
    after = own[place + 1 :]
    if verb == "version":
        return parse(["--version"])
    if verb == "help" and after and after[0] in NAMES:
        return parse([*after, "--help"])
    if verb == "help" or (not verb and any(word in HELP for word in own)):
        _print_overview()
    # Without a verb a bare word is a misspelt one, unless it is the value of a flag.
    strays = [] if verb else [word for word in _without_values(own) if _is_bare(word)]
    command = command_of(verb or "train")
    rest = _arranged(command, own[:place] if verb else [], after)
    name = command.name or ""
    if isinstance(command, Subverbs):
        name, command, rest = _subverb(command, rest)
    assert isinstance(command, Verb)
    call = Call(name, command.call(rest), command)
    if end < len(arguments):
        if name != "recipe import":
            raise refusal(f"--: {name} takes no words after it", "leave it out")
        call.arguments["command"] = list(arguments[end + 1 :])
    # `data` takes `--name VALUE` for any of its words, so it reports unknown flags itself.
    if verb != READS_FLAGS:
        problems = _flag_problems(name, command, call.words)
        problems += map(_unknown_verb, strays[:1])
        if problems:
            raise ConfigError(problems)
        # Verbs expect their paths first. The sort is stable: settings keep their order.
        call.words.sort(key=lambda word: not _is_bare(word))
    return call


def _verb_in(words: Sequence[str]) -> tuple[str, int]:
    """Return the first word that is a verb, and its place; empty: there is no verb."""
    for place, word in enumerate(words):
        # The value of a flag may have the name of a verb, as in `--out plan`.
        if word in NAMES and not (place and _takes_value(words[place - 1])):
            return word, place
        if word in WORDS and not any(_is_bare(earlier) for earlier in words[:place]):
            return word, place
    return "", -1


def _flags_named(word: str) -> list[tuple[str, click.Parameter]]:
    """Return the flags of this spelling, each with the whole name of its verb."""
    return [
        (name, param)
        for name, command in commands()
        for param in command.params
        if word in param.opts
    ]


def _takes_value(word: str) -> bool:
    """Return whether a word is a flag of some verb that takes the next word as its value."""
    return word.startswith("-") and any(isinstance(flag, Valued) for _, flag in _flags_named(word))


def _is_known(word: str) -> bool:
    return word in SHARED or bool(_flags_named(word))


def _without_values(words: Sequence[str]) -> list[str]:
    """Return the words that are not the value of the flag before them."""
    earlier = ["", *words]
    return [
        word
        for flag, word in zip(earlier, words, strict=False)
        if not flag.startswith("-") or (_is_known(flag) and not _takes_value(flag))
    ]


def _near(word: str, known: Iterable[str], cutoff: float, most: int = 1) -> list[str]:
    """Return the known words that are nearest to a word."""
    # only a mistyped word needs it
    import difflib

    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def _is_bare(word: str) -> bool:
    """Return whether a word is neither a flag nor a setting."""
    return "=" not in word and not word.startswith(("-", "+", "~"))


def _arranged(command: Paged, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the words of a verb as if all of them stood after it.

    A path from before the verb goes where the verb expects it; settings and flags follow the paths.

    Raises:
        ConfigError: a bare word before the verb is no such path.
    """
    others = list(before)
    words = list(after)
    bare = [word for word in _without_values(before) if _is_bare(word)]
    if bare:
        places = [place for place, word in enumerate(words, 1) if _is_bare(word)]
        at = command.declared.path_at
        # Only what exists counts as a path: any other bare word here is a misspelt verb.
        is_a_path = len(bare) == 1 and os.path.exists(os.path.expanduser(bare[0]))
        if at is None or len(places) < at or not is_a_path:
            raise ConfigError([_unknown_verb(bare[0])])
        others.remove(bare[0])
        words.insert(places[at - 1] if at else 0, bare[0])
    last = max((place for place, word in enumerate(words, 1) if _is_bare(word)), default=0)
    return [*words[:last], *others, *words[last:]]


def _subverb(group: Subverbs, words: Sequence[str]) -> tuple[str, Verb, list[str]]:
    """Return the whole name of the subverb in `words`, its command, and the other words.

    Raises:
        ConfigError: the subverb does not exist.
        click.exceptions.Exit: there is no subverb, so the page of the verb was printed.
    """
    place = next((place for place, word in enumerate(words) if _is_bare(word)), None)
    if place is None:
        # A verb without a subverb has no function, so its flags are not parsed.
        if "--version" in words:
            command_of("train").make_context("train", ["--version"])
        say_page(group.page())
        raise Exit(0 if any(word in HELP for word in words) else ConfigError.exit_code)
    word = words[place]
    subverb = group.commands.get(word)
    if subverb is None:
        near = _near(word, group.commands, 0.5, most=2)
        rule = f"{word}: there is no such subverb; subverbs: {', '.join(group.commands)}"
        fix = " or ".join(f"{group.name} {name}" for name in near) or f"{group.name} --help"
        raise refusal(rule, fix)
    return f"{group.name} {word}", subverb, [*words[:place], *words[place + 1 :]]


def _print_overview() -> Never:
    """Print the page of the program.

    Raises:
        click.exceptions.Exit: always.
    """
    lines = [f"usage: {program()} [VERB] [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAGS]", "", "verbs"]
    lines += [f"  {name:<10} {command_of(name).short_help}" for name in NAMES]
    lines += [f"  `{program()} VERB --help` prints the page of a verb", "", "values"]
    lines += [f"  {name:<15} {text}" for name, text in SETTINGS.items()]
    lines += [f"  groups: {' '.join(group_names())}", "", "flags of every verb"]
    lines += [f"  {name:<16} {text}" for name, text in FLAGS.items()]
    lines += ["", "examples"]
    for name in ("train", "check", "show"):
        lines += example_lines(command_of(name).declared.examples)
    lines += ["", EXIT_CODES]
    say_page("\n".join(lines))
    raise Exit(0)


def _flag_problems(name: str, command: Verb, words: list[str]) -> list[Problem]:
    """Return a problem for each word that begins as a flag."""
    problems: list[Problem] = []
    place = 0
    # A pasted command line of another system has hundreds of flags, and suggesting a setting for
    # each takes time; a report shows no more than these.
    while place < len(words) and len(problems) <= MAX_PROBLEMS:
        word = words[place]
        place += 1
        if not word.startswith("-") or word == "-" or "=" in word:
            continue
        following = words[place] if place < len(words) else ""
        if _is_known(word):
            problems.append(_flag_of_another(name, word, following))
            continue
        # A flag of another system may have no value, and the next word may be one of mtrain's
        # settings.
        value = following if "=" not in following and not following.startswith("--") else ""
        setting = _setting_of(word, value)
        if setting and value:
            place += 1
        problems.append(_unknown_flag(name, command, word, setting))
    return problems


def _flag_of_another(name: str, flag: str, following: str) -> Problem:
    """Return the problem of a flag that only other verbs have."""
    named = _flags_named(flag)
    fixes = [
        f"{owner} {flag} {following if isinstance(param, Valued) else ''}".rstrip()
        for owner, param in named
    ]
    owners = " and ".join(owner for owner, _ in named)
    rule = f"{flag}: it is a flag of {owners}, not of {name}"
    return Problem("MT010", "", None, rule, " or ".join(fixes), COMMAND_LINE)


def _setting_of(flag: str, value: str) -> str:
    """Return the setting that corresponds to a flag of another system; empty: it is unknown."""
    from mtrain.config.compose.grammar import parse_value
    from mtrain.config.messages.keys import suggest
    from mtrain.config.messages.suggestions import NOTHING, suggestions

    near, why = suggest(flag) if flag.startswith("--") else ([], "")
    # A misspelt flag of our own is no flag of another system.
    if not (near or why) or _near_flags(flag, cutoff=0.8):
        return ""
    with suppress(ValueError):
        text = " or ".join(suggestions(flag, parse_value(value) if value else True))
        return "" if text == NOTHING else text
    return ""


def _near_flags(flag: str, cutoff: float) -> list[str]:
    known = {name for _, command in commands() for name in command.flags()}
    return _near(flag, sorted({*known, "--version"}), cutoff)


def _unknown_flag(name: str, command: Verb, flag: str, setting: str) -> Problem:
    near = _near(flag, command.flags(), 0.5) or _near_flags(flag, cutoff=0.5)
    rule = f"{flag}: there is no such flag; flags of {name}: {', '.join(command.flags())}"
    fix = setting or (near[0] if near else "leave it out")
    return Problem("MT010", "", None, rule, fix, COMMAND_LINE)


def _unknown_verb(word: str) -> Problem:
    from mtrain.config.messages.keys import plain
    from mtrain.config.messages.suggestions import bare_word

    verbs = _near(plain(word).lower(), [*NAMES, *WORDS], 0.6)
    near = verbs or bare_word(word) or [f"{program()} --help, which lists the verbs"]
    rule = f"{word}: is neither a verb nor key=value; verbs: {', '.join(NAMES)}"
    return Problem("MT010", "", None, rule, " or ".join(near), COMMAND_LINE)
