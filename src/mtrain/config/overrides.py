"""The command line as data: choices, values, and which recipe or run file they stand on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.config.dump import override
from mtrain.config.intended import as_key, plain
from mtrain.config.interpolate import leaves
from mtrain.config.keys import field_of, suggest
from mtrain.config.load import load
from mtrain.config.near import (
    NOTHING,
    accepts,
    at_default,
    bare_word,
    choice_fix,
    default_choices,
    layouts_near,
    suggestions,
    taken,
)
from mtrain.config.paths import choices_of_group, conf_dir
from mtrain.config.run import GROUPS
from mtrain.errors import MAX_PROBLEMS, MAX_SHOWN, ConfigError, Problem

COMMAND_LINE = "command line"
MAX_ARGUMENT, MAX_COMMAND = 4096, 1 << 14
"""Characters of an argument, and of all of them."""

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*\Z")
CHOICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


@dataclass
class Overrides:
    """What a command line asks for."""

    choices: dict[str, str] = field(default_factory=dict)
    """group -> choice."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    recipe: str | None = None
    run: str | None = None
    problems: list[Problem] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    """Key of a choice or a leaf, `recipe` or `run` -> the argument that sets it."""
    above: dict[str, str] = field(default_factory=dict)
    """Section with a leaf that is set -> the first such argument."""


def read_overrides(argv: Sequence[str]) -> Overrides:
    """Reads every argument; what cannot be read becomes a problem and the rest is read, up to too many of them."""
    out = Overrides()
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
        rule = "a run file is complete, a recipe is a change to the defaults: only one can be the base"
        out.problems.append(_bad("recipe", out.recipe, rule, "leave out recipe= or run="))
    return out


def _note(argument: str, out: Overrides) -> Problem | None:
    """Remembers what an argument that was read sets; the problem where another one sets it as well."""
    key, _, text = argument.partition("=")
    chosen = key in (*GROUPS, "recipe", "run")
    paths = [f"{key}=" if chosen else key]  # a choice and a key inside it are two things
    if key in out.values:
        paths = [path for path, _ in leaves(out.values[key], key)]
    for path in paths:
        sections = [path[:i] for i, letter in enumerate(path) if letter == "."]
        first = next((out.said[p] for p in (path, *sections) if p in out.said), None) or out.above.get(path)
        if first is not None:
            rule = f"said twice, as {shortened(first)} and as {shortened(argument)}; one of them would be lost"
            both = "keep one of them" if key in GROUPS else f"{first} or {argument}"  # a choice may not be there
            return _bad(key, text, rule, first if first == argument else both, "MT004")
        out.said[path] = argument
        for section in sections:
            out.above.setdefault(section, argument)
    return None


def shortened(text: str) -> str:
    """The begin of a text that somebody wrote."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _bad(path: str, value: object, rule: str, fix: str, code: str = "MT010") -> Problem:
    return Problem(code, path, value, rule, fix, COMMAND_LINE)


def _read(argument: str, out: Overrides) -> Problem | None:
    if len(argument) > MAX_ARGUMENT:
        rule = f"an argument of {len(argument)} characters, more than the limit of {MAX_ARGUMENT}: {argument[:40]}..."
        return _bad("", None, rule, "put it into a recipe")
    key, equals, text = argument.partition("=")
    if argument.startswith(("+", "~")):
        word = "deleted" if argument.startswith("~") else "added"
        bare = key.lstrip("+~")
        near = [bare] if field_of(bare) else suggest(bare)[0]
        fix = f"{near[0]}={text}" if near and equals else NOTHING
        return _bad("", None, f"{argument}: keys are fixed by the schema; none can be {word}", fix)
    if not equals:
        return _no_equals(argument)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _bad(key, text, "Hydra itself is not configurable here: it only composes", NOTHING)
    if any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in argument):
        return _bad("", None, f"{argument.encode('ascii', 'replace').decode()}: is not UTF-8 text", NOTHING)
    if key in ("recipe", "run"):
        if not text:
            return _bad(key, text, "needs a name or a path", f"{key}=PATH")
        return _read_base(key, text, out)
    if key in GROUPS:
        problem = check_choice(key, text, COMMAND_LINE)
        if problem is None:
            out.choices[key] = text
        return problem
    if not _KEY.match(key):
        return _odd_key(key, text)
    return _read_value(key, text, out)


def _read_base(key: str, text: str, out: Overrides) -> Problem | None:
    """Reads `recipe=` or `run=`: the text as it stands, or what is inside its quotes."""
    from mtrain.config.source import parse_value

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
        return _bad("", None, f"{key}: settings have no dashes; {why or 'write key=value'}", _meant(key, text))
    if "/" in key or "@" in key or ":" in key:
        dotted = re.sub(r"[/@:].*", "", key) if "@" in key else key.replace("/", ".").replace(":", ".")
        fix = f"{dotted}={text}" if field_of(dotted) is not None else _meant(dotted, text)
        return _bad("", None, f"{key}: there are no groups inside groups, and no packages", fix)
    odd = next((c for c in key if c != plain(c)), None)
    what = f"; {odd} is U+{ord(odd):04X}, which only looks like {plain(odd)}" if odd is not None else ""
    return _bad("", None, f"{key!r}: a key is words joined by dots{what}", _meant(key, text))


def _meant(key: str, text: str) -> str:
    """The override that a misspelt key with a value as text may have stood for."""
    from mtrain.config.source import parse_value

    if as_key(key) in GROUPS:
        return _some_choice(as_key(key), text)
    try:
        return " or ".join(suggestions(key, parse_value(text)))
    except ValueError:
        return NOTHING


def check_choice(group: str, text: str, source: str) -> Problem | None:
    """The problem of `group=text` when `text` cannot even be a choice's name."""
    value: object = text
    if CHOICE.match(text):
        return None
    if text.startswith("{"):
        rule = "a group takes a choice; its keys are set one by one"
        return Problem("MT010", group, value, rule, _one_by_one(group, text) or NOTHING, source)
    first = text.strip("[] ").split(",")[0].strip().removesuffix(".yaml").removesuffix(".yml")
    fix = _some_choice(group, re.split(r"[/\\]", first)[-1])
    if text.startswith("["):
        rule = "two choices of one group would be merged silently; choose one"
    elif "," in text:
        rule = "a comma makes a sweep: -m trains or checks one run for each; without it, choose one"
    elif "/" in text or "\\" in text or text.startswith("."):
        rule = f"a choice is a file name under conf/{group}, not a path; a file of your own is a recipe: recipe=PATH"
        fix = f"recipe={text}" if source == COMMAND_LINE and _is_recipe(text) else fix
    else:
        rule = "needs the name of a choice"
    return Problem("MT010", group, value, rule, fix, source)


def _some_choice(group: str, text: str) -> str:
    """The first choice that a text may have meant, as an override."""
    if text in choices_of_group(group) or layouts_near(text) == [text]:
        return f"{group}={text}"
    return choice_fix(group, text, default_choices(conf_dir())[0][group]).split(" or ")[0]


def _is_recipe(text: str) -> bool:
    """Whether a file is there that has the parts of a recipe."""
    try:
        return os.path.isfile(text) and {*load(Path(text)).values} <= {*GROUPS, "defaults", "recipe"}
    except ConfigError:
        return False


def _one_by_one(group: str, text: str) -> str:
    """The keys of a mapping in place of a choice as overrides; empty where one of them is none."""
    from mtrain.config.source import parse_value

    try:
        found = list(leaves(parse_value(text), group))
    except ValueError:
        return ""
    return " ".join(override(*pair) for pair in found) if all(accepts(*pair) for pair in found) else ""


def _read_value(key: str, text: str, out: Overrides) -> Problem | None:
    from mtrain.config.source import Sweep, parse_value

    try:
        out.values[key] = parse_value(text)
    except Sweep:
        rule = "a comma or range makes a sweep: -m trains or checks one run for each value"
        return _bad(key, text, rule, _sweep_fix(key, text))
    except ValueError as error:
        quoted = "${" not in text and accepts(key, text)
        fix = override(key, text) if quoted else at_default(key) or NOTHING
        return _bad(key, text, f"cannot be read: {error}", fix)
    return None


def _sweep_fix(key: str, text: str) -> str:
    found = field_of(key)
    if found is not None and "tuple" in str(found.annotation):
        return f"{key}=[{text}]"
    if found is not None and "str" in str(found.annotation):
        return override(key, text)
    first = text.split(",")[0].strip() if re.match(r"[^(]*,", text) else ""
    read = taken(key, first) or taken(key, text)  # 0,001 is 0.001 where a comma marks the fraction
    return override(key, read[0]) if read else f"{key}={first}" if first else ""
