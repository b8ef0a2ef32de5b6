"""Configurations that hypothesis draws from the schema, so that a new key is drawn at once."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtrain.config.resolve.conditional import CONDITIONAL
from mtrain.config.rules import apply
from mtrain.config.schema.run import UnresolvedRun

SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "parallel.pipeline_layout": st.sampled_from(
        [None, "Et|tL", "Et*3|(tt|)*2tL", "Ettt|ttt|t|tmL"]
    ),
    "model.family": st.just("gpt"),
    "cluster.device": st.sampled_from(["cpu", "cuda", "auto"]),
}
NOT_DRAWN = ("recipe", "launch")
"""Sections without values of a run: metadata, and the launcher, which no file may set."""
LIMITS = ("ge", "gt", "le", "lt", "pattern")
WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,11}", fullmatch=True)
PATHS = st.text(alphabet="abcXYZ019 _-./'\"$\\#=&|;~{}*é", min_size=1, max_size=12).filter(
    lambda t: t.strip() == t
)


def runs() -> st.SearchStrategy[UnresolvedRun]:
    """Return a strategy for whole configurations that the schema accepts; keys without effect are
    off.
    """
    return _section(UnresolvedRun, "").map(
        lambda values: _quiet(UnresolvedRun.model_validate(values))
    )


def _quiet(run: UnresolvedRun) -> UnresolvedRun:
    for key in CONDITIONAL:
        if key.value(run) != key.off and not key.active(run):
            run = apply(run, {key.path: key.off})
    return run


def _section(section: type[BaseModel], prefix: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: _field(info, f"{prefix}{name}")
            for name, info in section.model_fields.items()
            if name not in NOT_DRAWN
        }
    )


def _field(info: FieldInfo, path: str) -> st.SearchStrategy[Any]:
    if path in SPECIAL:
        return SPECIAL[path]
    bounds: dict[str, Any] = {}
    for item in info.metadata:
        bounds |= {name: getattr(item, name) for name in LIMITS if _has(item, name)}
    return _of(info.annotation, path, bounds)


def _has(item: Any, name: str) -> bool:
    return getattr(item, name, None) is not None


def _of(annotation: Any, path: str, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Annotated:
        more = {n: getattr(i, n) for i in _flat(inside[1:]) for n in LIMITS if _has(i, n)}
        return _of(inside[0], path, bounds | more)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of(part, path, bounds) for part in inside))
    if origin is Literal:
        return st.sampled_from(inside)
    if origin is dict:
        return st.dictionaries(_of(inside[0], path, {}), _of(inside[1], path, {}), max_size=3)
    if origin is tuple:
        parts = [_of(part, path, {}) for part in inside if part is not Ellipsis]
        if Ellipsis in inside:
            return st.lists(parts[0], min_size=1, max_size=4)
        return st.tuples(*parts).map(list)
    return _plain(annotation, path, bounds)


def _flat(items: tuple[Any, ...]) -> list[Any]:
    return [part for item in items for part in (item, *getattr(item, "metadata", ()))]


def _plain(annotation: Any, path: str, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    if annotation is type(None):
        return st.none()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _section(annotation, f"{path}.")
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        low = bounds.get("ge", bounds.get("gt", -1) + 1)
        return st.integers(low, min(bounds.get("le", low + 300), bounds.get("lt", low + 301) - 1))
    if annotation is float:
        low = bounds.get("ge", bounds.get("gt", 0))
        high = bounds.get("le", bounds.get("lt", 1000))
        open_ends: dict[str, Any] = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
        return st.floats(low, high, allow_subnormal=False, **open_ends)
    assert annotation is str, f"{path}: {annotation} is not drawn yet; say how"
    return WORDS if "pattern" in bounds or path == "cluster.name" else PATHS
