"""A command line as a call of a verb, with its words and flags in any order.

click parses the flags of a verb. This module finds the verb, puts it first, and names what the user
may have meant by a word that no verb takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Never

from click.exceptions import Exit

from mtrain.cli.command import (
    DEBUG,
    HELP,
    SETTINGS,
    SHARED,
    Paged,
    Subverbs,
    Valued,
    Verb,
    refusal,
    typed,
)
from mtrain.cli.verbs import NAMES, command_of
from mtrain.config.compose.paths import group_names, program
from mtrain.errors import MAX_PROBLEMS, ConfigError, Problem, say_page

CONFIG_DIR = "--config-dir"
WORDS = {"help": "--help", "version": "--version"}
"""Words in the place of a verb -> the flag that they are."""
FLAGS = (
    (f"{CONFIG_DIR} DIR", "a folder of your own choices, as DIR/model/mine.yaml; or MTRAIN_CONF"),
    ("--json", "print JSON for a machine, if the page of the verb lists it"),
    ("--debug", DEBUG),
    ("-h, --help", "print a page"),
    ("--version", "print the version"),
)
READS_FLAGS = "data"
"""The verb whose subverbs take `--name VALUE` for `name=VALUE`."""


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
        assert self.command.callback is not None
        code: int = self.command.callback(**self.arguments)
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
    own, after_dashes = _split_at_dashes(arguments)
    verb, place = _verb_in(own)
    if verb in WORDS:
        return _parse_word(verb, own[place + 1 :])
    if not verb and any(word in HELP for word in own):
        _print_overview()
    strays = [] if verb else [word for word in _without_values(own) if _is_bare(word)]
    command = command_of(verb or "train")
    rest = _arranged(command, own[:place] if verb else [], own[place + 1 :])
    name = command.name or ""
    if isinstance(command, Subverbs):
        name, command, rest = _subverb(command, rest)
    assert isinstance(command, Verb)
    further: dict[str, Any] = {}
    if after_dashes is not None:
        if name != "recipe import":
            raise refusal(f"--: {name} takes no words after it", "leave it out")
        further["command"] = after_dashes
    call = Call(name, command.call(rest, **further), command)
    if verb != READS_FLAGS:
        problems = _flag_problems(name, command, call.words)
        problems += map(_unknown_verb, strays[:1])
        if problems:
            raise ConfigError(problems)
        call.words.sort(key=lambda word: not _is_bare(word))
    return call


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the words before `--`, and those after it; None: there is no `--`."""
    words = list(arguments)
    if "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _parse_word(word: str, after: Sequence[str]) -> Call:
    """Parse what follows `help` or `version`; always ends in a printed page."""
    flag = WORDS[word]
    if flag == "--help" and not (after and after[0] in NAMES):
        _print_overview()
    return parse([*after, flag] if flag == "--help" else [flag])


def _verb_in(words: Sequence[str]) -> tuple[str, int]:
    """Return the first word that is a verb, and its place; empty: there is no verb."""
    for place, word in enumerate(words):
        if word in NAMES and not (place and _takes_value(words[place - 1])):
            return word, place
        if word in WORDS and not any(_is_bare(earlier) for earlier in words[:place]):
            return word, place
    return "", -1


def commands() -> Iterator[tuple[str, Paged]]:
    """Yield every verb and subverb with its whole name."""
    for name in NAMES:
        command = command_of(name)
        yield name, command
        if isinstance(command, Subverbs):
            for subverb in command.commands.values():
                assert isinstance(subverb, Paged)
                yield f"{name} {subverb.name}", subverb


def _takes_value(word: str) -> bool:
    """Return whether a word is a flag of some verb that takes the next word as its value."""
    return word.startswith("-") and any(
        word in param.opts and isinstance(param, Valued)
        for _, command in commands()
        for param in command.params
    )


def _is_known(word: str) -> bool:
    """Return whether a word is a flag of some verb."""
    return word in SHARED or any(
        word in param.opts for _, command in commands() for param in command.params
    )


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
    import difflib  # only a mistyped word needs it

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
        at = command.path_at
        is_a_path = len(bare) == 1 and os.path.exists(os.path.expanduser(bare[0]))
        if at is None or len(places) < at or not is_a_path:
            raise ConfigError([_unknown_verb(bare[0])])
        others.remove(bare[0])
        words.insert(places[at - 1] if at else 0, bare[0])
    last = max((place for place, word in enumerate(words, 1) if _is_bare(word)), default=0)
    return [*words[:last], *others, *words[last:]]


def _subverb(group: Subverbs, words: Sequence[str]) -> tuple[str, Paged, list[str]]:
    """Return the whole name of the subverb in `words`, its command, and the other words.

    Raises:
        ConfigError: there is no such subverb.
        click.exceptions.Exit: there is no subverb, so the page of the verb was printed.
    """
    place = next((place for place, word in enumerate(words) if _is_bare(word)), None)
    if place is None:
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
    assert isinstance(subverb, Paged)
    return f"{group.name} {word}", subverb, [*words[:place], *words[place + 1 :]]


def _print_overview() -> Never:
    """Print the page of the program.

    Raises:
        click.exceptions.Exit: always.
    """
    shown = [command_of(name) for name in ("train", "check", "show")]
    examples = [example for command in shown for example in command.examples]
    lines = [f"usage: {program()} [VERB] [GROUP=CHOICE ...] [KEY=VALUE ...] [FLAGS]", "", "verbs"]
    lines += [f"  {name:<10} {command_of(name).short_help}" for name in NAMES]
    lines += [f"  `{program()} VERB --help` prints the page of a verb", "", "values"]
    lines += [f"  {name:<15} {text}" for name, text in SETTINGS]
    lines += [f"  groups: {' '.join(group_names())}", "", "flags of every verb"]
    lines += [f"  {name:<16} {text}" for name, text in FLAGS]
    lines += ["", "examples"]
    for words, text in examples:
        lines += [f"  {typed(words)}", f"      {text}"]
    lines += [
        "",
        "exit codes: 0 ok, 2 bad input, 3 environment, 4 damaged data, 5 training fault, 75"
        " preempted and resumable",
    ]
    say_page("\n".join(lines))
    raise Exit(0)


def _flag_problems(name: str, command: Verb, words: list[str]) -> list[Problem]:
    """Return a problem for each word that begins as a flag."""
    problems: list[Problem] = []
    place = 0
    while place < len(words) and len(problems) <= MAX_PROBLEMS:
        word = words[place]
        place += 1
        if not word.startswith("-") or word == "-" or "=" in word:
            continue
        following = words[place] if place < len(words) else ""
        if _is_known(word):
            problems.append(_flag_of_another(name, word, following))
            continue
        value = following if "=" not in following and not following.startswith("--") else ""
        setting = _setting_of(word, value)
        if setting and value:
            place += 1
        problems.append(_unknown_flag(name, command, word, setting))
    return problems


def _flag_of_another(name: str, flag: str, following: str) -> Problem:
    """Return the problem of a flag that only other verbs have."""
    fixes: list[str] = []
    owners: list[str] = []
    for owner, command in commands():
        param = next((param for param in command.params if flag in param.opts), None)
        if param is None:
            continue
        owners.append(owner)
        words = [owner, flag]
        if isinstance(param, Valued) and following:
            words.append(following)
        fixes.append(" ".join(words))
    rule = f"{flag}: it is a flag of {' and '.join(owners)}, not of {name}"
    return Problem("MT010", "", None, rule, " or ".join(fixes), "command line")


def _setting_of(flag: str, value: str) -> str:
    """Return the setting that corresponds to a flag of another system; empty: it is unknown."""
    from mtrain.config.compose.grammar import parse_value
    from mtrain.config.messages.keys import suggest
    from mtrain.config.messages.suggestions import NOTHING, suggestions

    near, why = suggest(flag) if flag.startswith("--") else ([], "")
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
    near = _near(flag, command.flags(), 0.5)
    near = near or _near_flags(flag, cutoff=0.5)
    rule = f"{flag}: there is no such flag; flags of {name}: {', '.join(command.flags())}"
    fix = setting or (near[0] if near else "leave it out")
    return Problem("MT010", "", None, rule, fix, "command line")


def _unknown_verb(word: str) -> Problem:
    from mtrain.config.compose.paths import program
    from mtrain.config.messages.keys import plain
    from mtrain.config.messages.suggestions import bare_word

    verbs = _near(plain(word).lower(), [*NAMES, *WORDS], 0.6)
    near = verbs or bare_word(word) or [f"{program()} --help, which lists the verbs"]
    rule = f"{word}: is neither a verb nor key=value; verbs: {', '.join(NAMES)}"
    return Problem("MT010", "", None, rule, " or ".join(near), "command line")
