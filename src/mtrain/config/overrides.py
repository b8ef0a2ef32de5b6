"""The command line as data: choices, values, and which recipe or run file they stand on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.config.dump import override
from mtrain.config.interpolate import leaves
from mtrain.config.keys import field_of, suggest
from mtrain.config.near import NOTHING, at_default, near_choice
from mtrain.config.paths import choices_of_group
from mtrain.config.run import GROUPS
from mtrain.errors import MAX_SHOWN, Problem

COMMAND_LINE = "command line"
MAX_ARGUMENT = 4096

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
    """Reads every argument; what cannot be read becomes a problem and the rest is read on."""
    out = Overrides()
    for argument in argv:
        problem = _read(argument, out) or _note(argument, out)
        if problem is not None:
            out.problems.append(problem)
    if out.recipe is not None and out.run is not None:
        rule = "a run file is complete, a recipe is a change to the defaults: only one can be the base"
        out.problems.append(_bad("recipe", out.recipe, rule, "leave out recipe= or run="))
    return out


def _note(argument: str, out: Overrides) -> Problem | None:
    """Remembers what an argument that was read sets; the problem where another one sets it as well."""
    key, _, text = argument.partition("=")
    paths = [f"{key}=" if key in GROUPS else key]  # a choice and a key inside it are two things
    if key in out.values:
        paths = [path for path, _ in leaves(out.values[key], key)]
    for path in paths:
        sections = [path[:i] for i, letter in enumerate(path) if letter == "."]
        first = next((out.said[p] for p in (path, *sections) if p in out.said), None) or out.above.get(path)
        if first is not None:
            rule = f"said twice, as {shortened(first)} and as {shortened(argument)}; one of them would be lost"
            return _bad(key, text, rule, f"{first} or {argument}" if first != argument else first, "MT004")
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
    for group in GROUPS:
        if argument.startswith(f"{group}:"):
            return _bad("", None, f"{argument}: a setting is key=value", argument.replace(":", "=", 1))
    return _bad("", None, f"{argument}: is neither a verb nor key=value", "see --help")


def _odd_key(key: str, text: str) -> Problem:
    bare = key.lstrip("-").replace("-", "_")
    if key.startswith("--"):
        near, why = suggest(bare)
        fix = f"{near[0]}={text}" if near else NOTHING
        return _bad("", None, f"{key}: settings have no dashes; {why or 'write key=value'}", fix)
    if "/" in key or "@" in key or ":" in key:
        dotted = re.sub(r"[/@:].*", "", key) if "@" in key else key.replace("/", ".").replace(":", ".")
        return _bad("", None, f"{key}: there are no groups inside groups, and no packages", f"{dotted}={text}")
    return _bad("", None, f"{key!r}: a key is words joined by dots", NOTHING)


def check_choice(group: str, text: str, source: str) -> Problem | None:
    """The problem of `group=text` when `text` cannot even be a choice's name."""
    value: object = text
    if CHOICE.match(text):
        return None
    if text.startswith("["):
        rule, names = "two choices of one group would be merged silently", text.strip("[]").split(",")
        return Problem("MT010", group, value, f"{rule}; choose one", f"{group}={names[0].strip()}", source)
    if "," in text:
        first = text.split(",")[0].strip()
        rule = "a comma makes a sweep: -m trains or checks one run for each; without it, choose one"
        return Problem("MT010", group, value, rule, f"{group}={first}", source)
    if "/" in text or "\\" in text or text.startswith("."):
        rule = f"a choice is a file name under conf/{group}, not a path"
        choices = choices_of_group(group)
        near = near_choice(re.split(r"[/\\]", text)[-1].removesuffix(".yaml"), choices) or choices
        return Problem("MT010", group, value, rule, f"{group}={near[0]}", source)
    if text.startswith("{"):
        rule = "a group takes a choice; its keys are set one by one"
        return Problem("MT010", group, value, rule, f"{group}.KEY=VALUE", source)
    return Problem("MT010", group, value, "needs the name of a choice", NOTHING, source)


def _read_value(key: str, text: str, out: Overrides) -> Problem | None:
    from mtrain.config.source import Sweep, parse_value

    try:
        out.values[key] = parse_value(text)
    except Sweep:
        rule = "a comma or range makes a sweep: -m trains or checks one run for each value"
        return _bad(key, text, rule, _sweep_fix(key, text))
    except ValueError as error:
        fix = override(key, text) if "${" not in text else at_default(key) or NOTHING
        return _bad(key, text, f"cannot be read: {error}", fix)
    return None


def _sweep_fix(key: str, text: str) -> str:
    found = field_of(key)
    if found is not None and "tuple" in str(found.annotation):
        return f"{key}=[{text}]"
    if found is not None and "str" in str(found.annotation):
        return override(key, text)
    return f"{key}={text.split(',')[0].strip()}" if re.match(r"[^(]*,", text) else ""
