"""The fixes of what the schema refuses, tried against the rules before they are shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from mtrain.config.dump import override
from mtrain.config.keys import field_of
from mtrain.config.rules import Answers, apply, findings
from mtrain.config.run import RunConfig
from mtrain.config.source import parse_value
from mtrain.errors import Problem

PROPOSED = ("MT013", "MT014", "MT007")
"""Codes whose fix is a value of ours, which must not even be unusual; others repeat the value that was written."""


def mended(
    problems: Sequence[Problem], partial: RunConfig, resolve: Callable[[RunConfig], RunConfig]
) -> list[Problem]:
    """`problems` with fixes that break no rule; `partial` is the configuration with each refused key as it would be
    if nobody had set it.

    A bound such as "at least 1" is allowed by the schema and may be useless beside the other keys: then the fix is
    the value that the key had before it was set.
    """
    trial = _Trial(partial, resolve)
    return [
        replace(p, fix=trial.best(trial.fix_of(p), unusual=p.code not in PROPOSED, meant=p.code == "MT013"))
        for p in problems
    ]


class _Trial:
    """Tries settings of one key beside those that were not refused."""

    def __init__(self, partial: RunConfig, resolve: Callable[[RunConfig], RunConfig]) -> None:
        self.partial, self.resolve = partial, resolve
        self.held, self.answers = partial.flat(), Answers()
        self.before = self._said(partial, unusual=False)

    def fix_of(self, problem: Problem) -> str:
        """The fix of a problem; for a bad value that has none, the value that its key held before."""
        path, held = problem.path, problem.code == "MT014" and problem.path in self.held
        return problem.fix or (override(path, self.held[path]) if held else "")

    def best(self, fix: str, *, unusual: bool, meant: bool) -> str:
        """Those alternatives of a fix that work; where the first does not, the value that its key held before.

        What was `meant` stays where the rest is broken already: it may fit once that is mended.
        """
        changes = [_change(text) for text in fix.split(" or ")]
        known = [change for change in changes if change is not None]
        if len(known) < len(changes):  # words, or several keys at once
            return fix
        good = [change for change in known if self._fits(*change, unusual=unusual)]
        if known[0] not in good and meant and self.before:
            return fix
        if known[0] not in good:  # another key that takes the value is not what was meant
            key = known[0][0]
            works = key in self.held and self._fits(key, self.held[key], unusual=True)
            good = [(key, self.held[key])] if works else known
        return " or ".join(dict.fromkeys(override(*change) for change in good))

    def _fits(self, key: str, value: Any, *, unusual: bool) -> bool:
        try:
            return self._said(apply(self.partial, {key: value}), unusual=unusual) <= self.before
        except (ValidationError, KeyError, TypeError):
            return False

    def _said(self, run: RunConfig, *, unusual: bool) -> set[tuple[str, str]]:
        """What the rules say of a run; warnings only where nothing `unusual` may be."""
        found = findings(self.resolve(run), self.answers)
        return {(f.code, f.path) for f in found if f.severity == "error" or not unusual}


def _change(text: str) -> tuple[str, Any] | None:
    """The key and value of an override of one key that exists; None for any other text."""
    try:
        words = shlex.split(text)
        key, _, value = words[0].partition("=") if len(words) == 1 else ("", "", "")
        return (key, parse_value(value)) if field_of(key) is not None else None
    except ValueError:
        return None
