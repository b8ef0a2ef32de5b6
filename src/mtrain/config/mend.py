"""The fixes of what the schema refuses, tried against the rules before they are shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from mtrain.config.dump import override
from mtrain.config.keys import field_of
from mtrain.config.rules import apply, findings
from mtrain.config.run import RunConfig
from mtrain.config.source import parse_value
from mtrain.errors import Problem


def mended(
    problems: Sequence[Problem], partial: RunConfig, resolve: Callable[[RunConfig], RunConfig]
) -> list[Problem]:
    """`problems` with fixes that break no rule; `partial` is the configuration with each refused key as it would be
    if nobody had set it.

    A bound such as "at least 1" is allowed by the schema and may be useless beside the other keys: then the fix is
    the value that the key had before it was set.
    """
    before = set(_said(resolve(partial)))
    return [replace(p, fix=_tried(p.fix, partial, resolve, before)) for p in problems]


def _tried(
    fix: str, partial: RunConfig, resolve: Callable[[RunConfig], RunConfig], before: set[tuple[str, str]]
) -> str:
    changes = [_change(text) for text in fix.split(" or ")]
    if not fix or None in changes:
        return fix
    good = [override(*change) for change in changes if change and _fits(change, partial, resolve, before)]
    if not good and changes[0] is not None:
        key = changes[0][0]
        beneath = key, partial.flat().get(key)
        good = [override(*beneath)] if key in partial.flat() and _fits(beneath, partial, resolve, before) else [fix]
    return " or ".join(dict.fromkeys(good))


def _change(text: str) -> tuple[str, Any] | None:
    """The key and value of an override of one key that exists; None for any other text."""
    try:
        words = shlex.split(text)
        key, _, value = words[0].partition("=") if len(words) == 1 else ("", "", "")
        return (key, parse_value(value)) if field_of(key) is not None else None
    except (ValueError, IndexError):
        return None


def _fits(
    change: tuple[str, Any],
    partial: RunConfig,
    resolve: Callable[[RunConfig], RunConfig],
    before: set[tuple[str, str]],
) -> bool:
    try:
        return set(_said(resolve(apply(partial, dict([change]))))) <= before
    except (ValidationError, KeyError, TypeError):
        return False


def _said(run: RunConfig) -> Iterator[tuple[str, str]]:
    return ((f.code, f.path) for f in findings(run))
