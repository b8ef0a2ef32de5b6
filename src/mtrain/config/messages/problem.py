"""Problems of a run, with the values and origins of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtrain.config.schema.base import Section
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import Problem, Related, Severity
from mtrain.object_store import is_remote, without_secret


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
    detail: str,
    fix: str,
    *,
    severity: Severity = "error",
    related: Iterable[str] = (),
) -> Problem:
    """Return the problem `code` of the key `path`; `related` are the other keys of its rule."""
    others = tuple(Related(key, plain(value_at(run, key)), origins.get(key, "")) for key in related)
    return Problem(
        code, path, plain(value_at(run, path)), detail, fix, origins.get(path, ""), severity, others
    )


def plain(value: Any) -> Any:
    """Return a value as YAML spells it; credentials in an address are left out."""
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, str) and is_remote(value):
        return without_secret(value)
    return list(value) if isinstance(value, tuple) else value


def distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Return `problems` without duplicates, or a second problem of a refused reference."""
    seen: dict[tuple[str, str, str, str], Problem] = {}
    refused_at: set[str] = set()
    for problem in problems:
        # The refused text of a reference is still there, and of the wrong type for its key.
        if problem.path in refused_at:
            continue
        if problem.code == "MT007":
            refused_at.add(problem.path)
        seen.setdefault((problem.code, problem.path, problem.detail, problem.source), problem)
    return list(seen.values())
