"""Problems of a run, with the values and origins of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtrain.config.schema.base import Section
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import Problem, Related, Severity


def value_at(run: UnresolvedRun, path: str) -> Any:
    """Return the value of a dotted key; None where its section is null."""
    node: Any = run
    for name in path.split("."):
        node = getattr(node, name, None)
    return node


def problem_of(
    run: UnresolvedRun,
    origins: Mapping[str, str],
    code: str,
    path: str,
    rule: str,
    fix: str,
    *,
    severity: Severity = "error",
    related: Iterable[str] = (),
) -> Problem:
    """Return the problem `code` of the key `path`; `related` are the other keys of its rule."""
    others = tuple(Related(key, plain(value_at(run, key)), origins.get(key, "")) for key in related)
    return Problem(
        code, path, plain(value_at(run, path)), rule, fix, origins.get(path, ""), severity, others
    )


def plain(value: Any) -> Any:
    """Return a value as YAML spells it."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Return `problems` without duplicates; a refused reference causes no second problem about its
    type.
    """
    seen: dict[tuple[str, str, str, str], Problem] = {}
    refused_at: set[str] = set()
    for problem in problems:
        if problem.path in refused_at:
            continue
        if problem.code == "MT007":
            refused_at.add(problem.path)
        seen.setdefault((problem.code, problem.path, problem.rule, problem.source), problem)
    return list(seen.values())
