"""A command line as a verb, its arguments and flags, in whatever order they were written."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mtrain.cli.verbs import (
    CONFIG_DIR,
    FLAGS,
    OF_ALL,
    OWN_WORDS,
    SHORT,
    SUBVERBED,
    TARGETED,
    VALUED,
    VERBS,
    WORDS,
)
from mtrain.errors import MAX_PROBLEMS, ConfigError, Problem


@dataclass
class Call:
    """A parsed command line."""

    verb: str
    arguments: list[str]
    flags: set[str]
    named: bool = True
    """Whether the verb was written."""
    values: dict[str, str] = field(default_factory=dict)
    """Of flags that have one."""


def folders_named(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders of `--config-dir DIR`, which may be given several times, and the other
    arguments.

    Raises:
        ConfigError: a folder is missing.
    """
    named = list[str]()
    rest = list[str]()
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if flag != CONFIG_DIR:
            rest.append(word)
        elif equals or queue:
            named.append(value if equals else queue.pop(0))
        else:
            rule = f"{CONFIG_DIR}: needs a folder"
            raise ConfigError(
                [Problem("MT010", "", None, rule, f"{CONFIG_DIR} DIR", "command line")]
            )
    return named, rest


def _values(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags that have a value, and the other arguments.

    Raises:
        ConfigError: one has none.
    """
    found = dict[str, str]()
    rest = list[str]()
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in VALUED:
            rest.append(word)
        elif value or (not equals and queue and not queue[0].startswith("-")):
            found[flag] = value or queue.pop(0)
        else:
            needs = f"{flag} {VALUED[flag]}"
            raise ConfigError(
                [Problem("MT010", "", None, f"{flag}: needs a value", needs, "command line")]
            )
    return found, rest


def parse(arguments: Sequence[str]) -> Call:
    """Verb, overrides and flags of a command line.

    Raises:
        ConfigError: a word that is no verb, or a flag that does not exist.
    """
    verb, place = _verb(arguments)
    before, after = _with_target(verb, arguments[: max(place, 0)], arguments[place + 1 :])
    strays = [
        word
        for word, flag in zip(before, ["", *before], strict=False)
        if _is_bare(word) and flag[:1] != "-"
    ]
    if verb in WORDS:
        of = after[:1]
        more = WORDS[verb] == "--help"
        if more and _is_verb(of):
            return Call(of[0], [], {"--help"})
        return Call("train", [], {WORDS[verb]}, False)
    if verb in OWN_WORDS:
        if strays:
            raise ConfigError([_unknown_verb(strays[0])])
        return _own_words(verb, before, after)
    given = [*before, *after]
    values, given = _values([SHORT.get(a, a) for a in given])
    flags = {a for a in given if a in FLAGS}
    problems, rest = _without_unknown_flags([a for a in given if a not in flags])
    unread = strays if verb else [word for word in rest if _is_bare(word)]
    problems += [_unknown_verb(word) for word in unread[:1]]
    problems += _of_another_verb(verb or "train", flags, values)
    if problems:
        raise ConfigError(problems)
    paths_first = sorted(rest, key=lambda word: not _is_bare(word))
    return Call(verb or "train", paths_first, flags, bool(verb), values)


def _with_target(
    verb: str, before: Sequence[str], after: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the words before and behind a verb, with the one path that stands before a verb on
    paths moved to its place.
    """
    of_a_flag = [
        flag[:1] == "-" and (flag in VALUED or flag not in FLAGS) for flag in ("", *before)
    ]
    bare = [place for place, word in enumerate(before) if _is_bare(word) and not of_a_flag[place]]
    moves = verb in TARGETED or (verb in SUBVERBED and any(map(_is_bare, after)))
    if not moves or len(bare) != 1 or not os.path.exists(os.path.expanduser(before[bare[0]])):
        return [*before], [*after]
    if verb in SUBVERBED:
        subverb = next(place for place, word in enumerate(after) if _is_bare(word)) + 1
    else:
        subverb = 0
    path = before[bare[0]]
    return [*before[: bare[0]], *before[bare[0] + 1 :]], [*after[:subverb], path, *after[subverb:]]


def _own_words(verb: str, before: Sequence[str], after: Sequence[str]) -> Call:
    """Return the call of a verb that reads its arguments itself, with what was written before the
    verb behind its paths.
    """
    flags = {SHORT.get(a, a) for a in before} & {*FLAGS}
    moved = [a for a in before if a == "--json" or SHORT.get(a, a) not in OF_ALL]
    rest = [a for a in after if a != "--debug"]
    said = rest[: rest.index("--")] if "--" in rest else rest
    behind = max((place for place, word in enumerate(said, 1) if _is_bare(word)), default=0)
    return Call(verb, [*rest[:behind], *moved, *rest[behind:]], flags | ({"--version"} & {*said}))


def _verb(arguments: Sequence[str]) -> tuple[str, int]:
    """Return the first word that is a verb, wherever it stands, and its place; empty: there is
    none.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    known = {*VERBS, *OWN_WORDS}
    for place, word in enumerate(own):
        of_a_flag = place > 0 and own[place - 1] in VALUED
        if word in known and not of_a_flag:
            return word, place
        if word in WORDS and not any(_is_bare(before) for before in own[:place]):
            return word, place
    return "", -1


def _is_verb(words: Sequence[str]) -> bool:
    return bool(words) and words[0] in VERBS


def _is_bare(word: str) -> bool:
    """Return whether a word is neither a flag nor a setting."""
    return "=" not in word and not word.startswith(("-", "+", "~"))


def _of_another_verb(verb: str, flags: set[str], values: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each flag that the page of the verb does not have."""
    strange = sorted({*flags, *values} - OF_ALL)
    if not strange or "--help" in flags:
        return []
    from mtrain.cli.pages import PAGES, flags_of

    problems = list[Problem]()
    for flag in strange:
        of = [each for each in PAGES if flag in flags_of(each)]
        if verb not in of:
            fix = " or ".join(
                " ".join([each, flag, *([values[flag]] if flag in values else [])]) for each in of
            )
            rule = f"{flag}: a flag of {' and '.join(of)}, not of {verb}"
            problems.append(Problem("MT010", "", None, rule, fix, "command line"))
    return problems


def _without_unknown_flags(words: Sequence[str]) -> tuple[list[Problem], list[str]]:
    """Return a problem for each word that begins as a flag and is none, and the words without them
    and their values.
    """
    problems = list[Problem]()
    rest = list[str]()
    queue = list(words)
    while queue and len(problems) <= MAX_PROBLEMS:
        word = queue.pop(0)
        if not word.startswith("-") or "=" in word:
            rest.append(word)
            continue
        value = queue[0] if queue and "=" not in queue[0] and not queue[0].startswith("--") else ""
        fix = _setting_of(word, value)
        if fix and value:
            queue.pop(0)
        problems.append(_unknown_flag(word, fix))
    return problems, rest


def _setting_of(flag: str, value: str) -> str:
    """What a flag of another system is called here, with its value; empty where nothing
    is known.
    """
    from mtrain.config.compose.grammar import parse_value
    from mtrain.config.messages.keys import suggest
    from mtrain.config.messages.suggestions import NOTHING, suggestions

    near, why = suggest(flag) if flag.startswith("--") else ([], "")
    if not (near or why) or difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.8):
        return ""
    with suppress(ValueError):
        found = " or ".join(suggestions(flag, parse_value(value) if value else True))
        return "" if found == NOTHING else found
    return ""


def _unknown_flag(flag: str, fix: str) -> Problem:
    near = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.5)
    rule = f"{flag}: there is no such flag; flags: {', '.join(FLAGS)}"
    fix = fix or (near[0] if near else "leave it out")
    return Problem("MT010", "", None, rule, fix, "command line")


def _unknown_verb(word: str) -> Problem:
    from mtrain.config.compose.paths import program
    from mtrain.config.messages.keys import plain
    from mtrain.config.messages.suggestions import bare_word

    verbs = difflib.get_close_matches(plain(word).lower(), [*VERBS, *WORDS], n=1, cutoff=0.6)
    near = verbs or bare_word(word) or [f"{program()} --help lists the verbs"]
    rule = f"{word}: is neither a verb nor key=value; verbs: {', '.join(VERBS)}"
    return Problem("MT010", "", None, rule, " or ".join(near), "command line")
