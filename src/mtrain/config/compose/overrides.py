"""The command line as data, in Hydra's grammar: choices, values, and the recipe or run file; a
sweep is one command line for each combination of its values.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.config.compose.choices import check_choice, some_choice
from mtrain.config.compose.dump import override, spell
from mtrain.config.compose.grammar import sweep_values
from mtrain.config.compose.interpolate import KEY, leaves
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import is_group
from mtrain.config.messages import unread
from mtrain.config.messages.keys import as_key, field_of, plain, suggest
from mtrain.config.messages.suggestions import (
    NOTHING,
    SWEPT,
    bare_word,
    default_choices,
    suggestions,
    taken,
)
from mtrain.config.messages.unread import (
    MOST,
    is_empty,
    is_list_of_values,
    meant,
    names_of,
    why_unread,
)
from mtrain.config.schema.run import GROUPS
from mtrain.errors import MAX_PROBLEMS, ConfigError, Problem, cut

# Limits: characters of one argument, and of all of them.
MAX_ARGUMENT = 4096
MAX_COMMAND = 1 << 14
SHORT = "rewards=["
"""Beginning of an argument that means `rollout.rewards`."""


@dataclass
class Overrides:
    """A parsed command line."""

    choices: dict[str, str] = field(default_factory=dict)
    """group -> choice."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    added: dict[str, str] = field(default_factory=dict)
    """`+group=choice` of a user's own group: group -> choice."""
    new: dict[str, str] = field(default_factory=dict)
    """`+key=value`, which adds a key that nothing else sets: key -> the argument."""
    deleted: dict[str, str] = field(default_factory=dict)
    """`~key` or `~group`, which deletes what files set: key or group -> the argument."""
    only: dict[str, Any] = field(default_factory=dict)
    """`~key=value` or `~group=choice`, which deletes only that value: key or group -> value."""
    recipe: str | None = None
    run: str | None = None
    problems: list[Problem] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    """Key of a choice or a leaf, `recipe` or `run` -> the argument that sets it."""
    above: dict[str, str] = field(default_factory=dict)
    """Section in which a leaf is set -> the first such argument."""


def read_overrides(argv: Sequence[str]) -> Overrides:
    """Read every argument; report a bounded number of problems for those that cannot be read."""
    out = Overrides()
    # A refusal comes within a second, and suggestions compare the whole text with every key.
    if (size := sum(map(len, argv))) > MAX_COMMAND:
        rule = f"a command line of {size} characters, more than the limit of {MAX_COMMAND}"
        out.problems.append(_bad("", None, rule, "put it into a recipe"))
        return out
    for argument in argv:
        problem = _read(argument, out) or _note(argument, out)
        if problem is not None:
            out.problems.append(problem)
        if len(out.problems) > MAX_PROBLEMS:
            break
    if out.recipe is not None and out.run is not None:
        rule = (
            "a run file is complete, a recipe is a change to the defaults: only one can be the base"
        )
        out.problems.append(_bad("recipe", out.recipe, rule, "leave out recipe= or run="))
    return out


def _in_full(argument: str) -> str:
    """Return an argument without the short form of a key: `rewards=[exact]`."""
    return f"rollout.{argument}" if argument.startswith(SHORT) else argument


def _note(argument: str, out: Overrides) -> Problem | None:
    """Record what an argument sets; return a problem if another argument sets the same."""
    argument = _in_full(argument)
    key, _, text = argument.partition("=")
    key = key.lstrip("+~")
    chosen = key in (*GROUPS, *out.added, "recipe", "run")
    paths = [f"{key}=" if chosen else key]  # a choice and a key inside it are two things
    if key in out.values:
        paths = [path for path, _ in leaves(out.values[key], key)]
    # A section and a key inside it collide, too: `model.moe=null model.moe.num_experts=8`.
    for path in paths:
        sections = [path[:i] for i, letter in enumerate(path) if letter == "."]
        first = next(
            (out.said[p] for p in (path, *sections) if p in out.said), None
        ) or out.above.get(path)
        if first is not None:
            rule = f"set twice, as {cut(first)} and as {cut(argument)}; one of them would be lost"
            # a choice may not be there
            both = "keep one of them" if key in GROUPS else f"{first} or {argument}"
            return _bad(key, text, rule, first if first == argument else both, "MT004")
        out.said[path] = argument
        for section in sections:
            out.above.setdefault(section, argument)
    return None


def _bad(path: str, value: object, rule: str, fix: str, code: str = "MT010") -> Problem:
    return Problem(code, path, value, rule, fix, COMMAND_LINE)


def _read(argument: str, out: Overrides) -> Problem | None:
    argument = _in_full(argument)
    if len(argument) > MAX_ARGUMENT:
        rule = (
            f"an argument of {len(argument)} characters, more than the limit of {MAX_ARGUMENT}:"
            f" {argument[:40]}..."
        )
        return _bad("", None, rule, "put it into a recipe")
    # Python decodes bytes that are not UTF-8 to surrogates, which cannot be written to run.yaml.
    if any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in argument):
        return _bad(
            "", None, f"{argument.encode('ascii', 'replace').decode()}: is not UTF-8 text", NOTHING
        )
    key, equals, text = argument.partition("=")
    sign = re.match(r"[+~]*", argument).group()  # type: ignore[union-attr]
    key = key.removeprefix(sign)
    if sign not in ("", "+", "++", "~"):
        return _bad(
            "", None, f"{argument}: a setting begins with +, ++, ~ or its key", f"{key}={text}"
        )
    if sign == "~" and key:
        return _delete(argument, key, out)
    if not equals:
        return _no_equals(argument)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _bad(key, text, "Hydra itself is not configurable here: it only composes", NOTHING)
    if key in ("recipe", "run"):
        if not text:
            return _bad(key, text, "needs a name or a path", f"{key}=PATH")
        return _read_base(key, text, out)
    if key in GROUPS:
        return _choose(sign, key, text, out)
    if not KEY.match(key):
        return _odd_key(key, text)
    if "." not in key and (is_group(key) or key in default_choices()[0]):
        return _own_group(sign, key, text, out)
    problem = _read_value(key, text, out)
    # `++key=value` adds or replaces in Hydra, which every setting does here; only `+` insists.
    if problem is None and sign == "+":
        out.new[key] = argument
    return problem


def _choose(sign: str, group: str, text: str, out: Overrides) -> Problem | None:
    """Read `group=choice`; a second equal choice is not added."""
    if sign:
        rule = (
            f"{sign}{group}={text}: every run has one choice of {group} already; without the {sign}"
            " it is replaced"
        )
        return _bad(group, text, rule, some_choice(group, text))
    text = _unquoted(text)
    problem = check_choice(group, text, COMMAND_LINE)
    if problem is None:
        out.choices[group] = text
    return problem


def _own_group(sign: str, group: str, text: str, out: Overrides) -> Problem | None:
    """Read a choice of a group that only a user's folder has: `+group=choice` as in Hydra."""
    if group in default_choices()[0]:
        return _choose(sign, group, text, out)
    text = _unquoted(text)
    problem = check_choice(group, text, COMMAND_LINE)
    if problem is not None:
        return problem
    if sign == "+":
        out.added[group] = text
        return None
    rule = (
        f"{sign}{group}={text}: nothing chooses from {group} so far; a choice of it is added with"
        " one +"
    )
    return _bad("", None, rule, f"+{group}={text}")


def _delete(argument: str, key: str, out: Overrides) -> Problem | None:
    """Read `~key` or `~group`: it deletes what files set, and the schema's default holds."""
    from mtrain.config.compose.grammar import parse_value

    _, equals, text = argument.partition("=")
    if key in GROUPS or (KEY.match(key) and not key.startswith("hydra")):
        out.deleted[key] = argument
        if not equals:
            return None
        try:
            out.only[key] = _unquoted(text) if is_group(key) else parse_value(text)
        except ValueError as error:
            return _bad("", None, f"{argument}: the value cannot be read: {error}", f"~{key}")
        return None
    near = suggest(key)[0]
    return _bad(
        "",
        None,
        f"{argument}: there is no such key to delete",
        f"~{near[0]}" if near else NOTHING,
    )


def _unquoted(text: str) -> str:
    """Return a text without its surrounding quotes."""
    from mtrain.config.compose.grammar import parse_value

    try:
        return str(parse_value(text)) if text[:1] in ("'", '"') else text
    except ValueError:
        return text


def _read_base(key: str, text: str, out: Overrides) -> Problem | None:
    """Read `recipe=` or `run=` with or without quotes."""
    from mtrain.config.compose.grammar import parse_value

    if text[0] in "'\"":
        try:
            text = str(parse_value(text))
        except ValueError as error:
            return _bad(key, text, f"cannot be read: {error}", f"{key}=PATH")
    setattr(out, key, text)
    return None


def _no_equals(argument: str) -> Problem:
    if argument.startswith("-"):
        return _bad("", None, f"{argument}: there is no such flag", "see --help")
    fixes = bare_word(argument)
    rule = "a setting is key=value" if fixes else "is neither a verb nor key=value"
    return _bad("", None, f"{argument}: {rule}", " or ".join(fixes) or NOTHING)


def _odd_key(key: str, text: str) -> Problem:
    if key.startswith("--"):
        why = suggest(key)[1]
        return _bad(
            "",
            None,
            f"{key}: settings have no dashes; {why or 'write key=value'}",
            _meant(key, text),
        )
    if "/" in key or "@" in key or ":" in key:
        group, _, name = key.partition("/")
        if group in GROUPS and "@" not in key and ":" not in key:
            rule = f"{key}: a folder inside a group is part of the choice's name"
            known = field_of(f"{group}.{name}") is not None
            return _bad(
                "", None, rule, f"{group}.{name}={text}" if known else f"{group}={name}/{text}"
            )
        dotted = (
            re.sub(r"[/@:].*", "", key) if "@" in key else key.replace("/", ".").replace(":", ".")
        )
        fix = f"{dotted}={text}" if field_of(dotted) is not None else _meant(dotted, text)
        return _bad("", None, f"{key}: a key is words joined by dots; there are no packages", fix)
    odd = next((c for c in key if c != plain(c)), None)
    if odd is not None:
        what = f"; {odd} is U+{ord(odd):04X}, which only looks like {plain(odd)}"
    else:
        what = ""
    return _bad("", None, f"{key!r}: a key is words joined by dots{what}", _meant(key, text))


def _meant(key: str, text: str) -> str:
    """Return the override that a misspelt key with a text value may have meant."""
    from mtrain.config.compose.grammar import parse_value

    if as_key(key) in GROUPS:
        return some_choice(as_key(key), text)
    try:
        return " or ".join(suggestions(key, parse_value(text)))
    except ValueError:
        return NOTHING


def _read_value(key: str, text: str, out: Overrides) -> Problem | None:
    from mtrain.config.compose.grammar import Sweep, parse_value

    try:
        value = parse_value(text)
        if (meant := unread.as_text(key, text, value)) is not None:
            rule = f"must be text, and {text} without quotes is {spell(value)}"
            return _bad(key, value, rule, override(key, meant), "MT013")
        out.values[key] = value
    except Sweep:
        rule = "a comma or range makes a sweep: -m trains or checks one run for each value"
        if not (fix := _sweep_fix(key, text)):
            rule = unread.why_unread(key, text, rule)
            fix = unread.meant(key, text, sweep=False)
        return _bad(key, text, rule, fix)
    except ValueError as error:
        rule = f"cannot be read: {unread.why_unread(key, text, str(error))}"
        return _bad(key, text, rule, unread.meant(key, text, sweep=False))
    return None


def _sweep_fix(key: str, text: str) -> str:
    """Return each count's words with its swept ones, and a problem per wrong number of values."""
    found = field_of(key)
    if found is not None and "tuple" in str(found.annotation):
        return f"{key}=[{text}]"
    if found is not None and "str" in str(found.annotation):
        return override(key, text)
    if (fraction := taken(key, text)) and re.match(
        r"[^(]*,", text
    ):  # 0,001 where a comma marks the fraction
        return override(key, fraction[0])
    return SWEPT if unread.values_of(key, text) else ""


MAX_RUNS = MOST


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    argv: tuple[str, ...]
    swept: dict[str, str]
    """The swept keys with this run's values."""

    @property
    def differs(self) -> str:
        """Return the settings that distinguish this run from the others."""
        return (
            " ".join(f"{key}={value}" for key, value in self.swept.items()) or "(nothing is swept)"
        )


def jobs(argv: Sequence[str]) -> list[Job]:
    """Return every combination of the swept values; the last key varies fastest.

    Raises:
        ConfigError: a value cannot be read, a sweep is empty, or there are more than 1000 runs.
    """
    words: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    swept: list[str] = []
    problems: list[Problem] = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        values = [text]
        if equals:
            try:
                values = _values(key, text)
            except ValueError as error:
                rule = why_unread(key, text, str(error))
                fix = meant(key, text, sweep=True)
                problems.append(Problem("MT010", key, text, rule, fix, COMMAND_LINE))
        if equals and key in given:
            rule = (
                f"set twice, as {cut(given[key])} and as {cut(argument)}; one of them would be lost"
            )
            problems.append(Problem("MT004", key, text, rule, "keep one of them", COMMAND_LINE))
        given[key] = argument
        swept += [key] if values != [text] else []
        words[key] = [f"{key}={value}" for value in values] if equals else [argument]
    if problems:
        raise ConfigError(problems)
    count = math.prod(len(values) for values in words.values())
    if count > MAX_RUNS:
        rule = f"{count} runs; a sweep makes at most {MAX_RUNS}"
        raise ConfigError.of("MT010", "", None, rule, "sweep over fewer values", COMMAND_LINE)
    keys = list(words)
    return [
        Job(chosen, {key: chosen[keys.index(key)].partition("=")[2] for key in swept})
        for chosen in itertools.product(*words.values())
    ]


def _values(key: str, text: str) -> list[str]:
    """Return the values that a text means, each as written.

    Raises:
        ValueError: it is not in the grammar, means no value, or is a list in place of values.
    """
    if not text and is_empty(key):
        raise ValueError("is empty")
    # Most values are plain words, which need no parser.
    if not set(text) & {*",(;["}:
        return [text]
    found = sweep_values(text, names_of(key), MAX_RUNS)
    if found == []:
        raise ValueError("stands for nothing")
    if found is None and is_list_of_values(key, text):
        raise ValueError(
            "a list is one value; values of a sweep are parted by commas, without brackets"
        )
    return found or [text]
