"""Fixes for keys that the schema refuses, tried against the rules before they are shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from mtrain.config.compose.dump import override
from mtrain.config.compose.grammar import parse_value
from mtrain.config.compose.layout_string import parse_layout
from mtrain.config.compose.paths import find_config
from mtrain.config.compose.yaml_reader import load
from mtrain.config.messages.keys import field_of, is_content
from mtrain.config.messages.suggestions import NEAREST, is_number
from mtrain.config.rules import Answers, apply, findings
from mtrain.config.schema.run import GROUPS, RunConfig, UnresolvedRun
from mtrain.errors import Problem

Resolve = Callable[[UnresolvedRun], RunConfig]
PROPOSED = ("MT013", "MT014", "MT007")
"""Codes whose fix is a value of mtrain's choice, which must not even cause a warning. Other fixes
repeat the written value or its nearest.
"""
KEPT = ("MT010", "MT012", "MT013")
"""Codes whose fix is the written value in other words, valid whatever rule it breaks."""


def with_fixes(
    problems: Sequence[Problem],
    partial: UnresolvedRun,
    resolve: Resolve,
) -> list[Problem]:
    """Return `problems` with fixes that break no rule.

    `partial` is the configuration with each refused key unset. The schema allows a bound such as
    "at least 1" that may be useless with the other keys: then the fix is the key's previous value,
    unless that would discard a text, a list or a path.
    """
    trial = _Trial(partial, resolve)
    return [
        _with_fix(problem, trial) if problem.code not in ("MT003", "MT004", "MT018") else problem
        for problem in problems
    ]


def _with_fix(problem: Problem, trial: _Trial) -> Problem:
    keep = problem.code in KEPT or problem.detail.endswith(NEAREST)
    if problem.fix:
        fix = trial.best(problem.fix, problem.path, unusual=_is_meant(problem), keep=keep)
    else:
        fix = ""
    return replace(problem, fix=fix or trial.before_it(problem.path, problem.value))


def _is_meant(problem: Problem) -> bool:
    """Return whether the fix is the written value in other words."""
    return problem.code not in PROPOSED or problem.detail.endswith(NEAREST)


class _Trial:
    """A trial of settings of one key against the keys that were not refused."""

    def __init__(self, partial: UnresolvedRun, resolve: Resolve) -> None:
        self.partial = partial
        self.resolve = resolve
        self.held = partial.flat()
        self.answers = Answers()
        self.before = self._said(partial, unusual=False)

    def best(self, fix: str, path: str, *, unusual: bool, keep: bool) -> str:
        """Return the alternatives of a fix that work; empty if the first does not.

        An alternative in `keep` stays if the rest is broken anyway, because it may fit once the
        rest is corrected; otherwise it comes with the change of another key that makes it fit, if
        there is one.
        """
        changes = [_change(text) for text in fix.split(" or ")]
        known = [change for change in changes if change is not None]
        if len(known) < len(changes):  # words, or several keys at once
            return fix
        good = [change for change in known if self._fits(*change, unusual=unusual)]
        if known[0] not in good and keep and self.before:
            return fix
        if known[0] not in good and keep and (together := self._with_another(*known[0])):
            return together
        of_layouts = bool(good) and isinstance(known[0][1], Layout)
        if (
            known[0] not in good and not of_layouts
        ):  # another key that takes the value is no suggestion for this one
            return fix if keep else ""
        return " or ".join(dict.fromkeys(_spelled(*change) for change in good))

    def before_it(self, path: str, value: object) -> str:
        """Return the value that a key had before an empty one: an out-of-range number, but no text
        or list.

        Null does not replace a number: zero minutes do not mean the default minutes.
        """
        # A fix never replaces a person's value by mtrain's.
        said = (isinstance(value, (str, list)) and len(value) > 0) or (
            is_number(value) and self.held.get(path) is None
        )
        if (
            said
            or path not in self.held
            or is_content(path)
            or not self._fits(path, self.held[path], unusual=True)
        ):
            return ""
        return override(path, self.held[path])

    def _with_another(self, key: str, value: Any) -> str:
        """Return a setting with the first change of other keys that makes it valid, or ""."""
        try:
            run = self.resolve(apply(self.partial, {key: value}))
        except (ValidationError, KeyError, TypeError):
            return ""
        broken = [
            f
            for f in findings(run)
            if f.severity == "error" and (f.code, f.path) not in self.before
        ]
        # The first broken rule is enough: its fixes are tried together with the setting.
        changes = [
            {key: value, **change}
            for f in broken[:1]
            for change in f.fixes[:4]
            if key not in change
        ]
        works = next((c for c in changes if self._all_fit(c)), {})
        return " ".join(override(*change) for change in works.items())

    def _all_fit(self, changes: Mapping[str, Any]) -> bool:
        try:
            return self._said(apply(self.partial, changes), unusual=False) <= self.before
        except (ValidationError, KeyError, TypeError):
            return False

    def _fits(self, key: str, value: Any, *, unusual: bool) -> bool:
        try:
            value = value.values if isinstance(value, Layout) else value
            return self._said(apply(self.partial, {key: value}), unusual=unusual) <= self.before
        except (ValidationError, KeyError, TypeError):
            return False

    def _said(self, run: UnresolvedRun, *, unusual: bool) -> set[tuple[str, str]]:
        """Return the findings for a run; unless `unusual`, warnings and missing inputs count."""
        found = findings(self.resolve(run), self.answers)
        return {
            (f.code, f.path)
            for f in found
            if not unusual or (f.severity == "error" and f.lacks != "input")
        }


@dataclass(frozen=True)
class Layout:
    """A layout string and the values of the group `parallel` that it means."""

    word: str
    values: dict[str, Any]


def _layout(word: str) -> dict[str, Any]:
    """Return the values of a named layout or of a layout string.

    Raises:
        ValueError: it is neither.
    """
    file = find_config(f"parallel/{word}")
    return load(file).values if file is not None else parse_layout(word)


def _spelled(key: str, value: Any) -> str:
    return f"{key}={value.word}" if isinstance(value, Layout) else override(key, value)


def _change(text: str) -> tuple[str, Any] | None:
    """Return the key and value of an override of one existing key; None for any other text."""
    try:
        words = shlex.split(text)
        key, _, value = words[0].partition("=") if len(words) == 1 else ("", "", "")
        # A choice changes many keys at once, and is not tried here; a layout is.
        if key in ("recipe", "run", *GROUPS) and key != "parallel":
            return None
        if key == "parallel":
            return key, Layout(value, _layout(value))
        return (key, parse_value(value)) if field_of(key) is not None else None
    except ValueError:
        return None
