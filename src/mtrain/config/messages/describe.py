"""Keys in words, derived from the schema: their type, default, condition and effect, and the text
below each field, read from the source on demand.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mtrain.config.compose.dump import spell
from mtrain.config.messages.keys import field_of, key_of, schema_keys, section_in
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import GROUPS, UnresolvedRun

EFFECTS = {
    Effect.ARCHITECTURE: (
        "architecture: the weights themselves; a checkpoint with another value cannot be continued"
    ),
    Effect.NUMERICS: "numerics: the resulting weights",
    Effect.CONTENTS: (
        "contents: the resulting weights, by the contents of the named place; a resume compares"
        " contents, not names"
    ),
    Effect.PARALLELISM: (
        "parallelism: the sharding or speed of the work; numbers change in their last digits only"
    ),
    Effect.RUNTIME: "runtime: names, places, limits, output; no weight",
}
"""Effect -> the consequence of changing the key, in words."""

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_BOUNDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "pattern": "matching",
}


def type_of(path: str) -> str:
    """Return a key's type in words, such as `a whole number, at least 1, or null`."""
    field = field_of(path)
    if field is None:
        return ""
    null, words = _split(field.annotation)
    bounds = [*_bounds(field.metadata), *_bounds(_annotated(field.annotation))]
    unit = f" ({unit})" if (unit := key_of(path).unit) else ""
    return ", ".join([words + unit, *dict.fromkeys(bounds)]) + (", or null" if null else "")


def default_of(path: str) -> str:
    """Return the default as YAML; `(required)` without one."""
    field = field_of(path)
    value = field.get_default(call_default_factory=True) if field is not None else PydanticUndefined
    return "(required)" if value is PydanticUndefined else spell(_as_data(value))


def section_of(path: str) -> type[BaseModel] | None:
    """Return the section class of a group or of a section inside one, such as `model.moe`."""
    section: Any = UnresolvedRun
    for name in path.split("."):
        info = section.model_fields.get(name)
        if info is None:
            return None
        # The class of a section may stand inside of `X | None`.
        found = [a for a in (info.annotation, *get_args(info.annotation)) if isinstance(a, type)]
        section = next((a for a in found if issubclass(a, BaseModel)), None)
        if section is None:
            return None
    kept: type[BaseModel] = section
    return kept


def keys_of(path: str) -> list[str]:
    """Return every key of a group or section."""
    return [key for key in schema_keys() if key.startswith(f"{path}.")]


def meaning(path: str) -> str:
    """Return a key's documentation in one line; empty for an unknown key."""
    documented()
    field = field_of(path)
    return " ".join((field.description or "").split()) if field is not None else ""


def summary(path: str) -> str:
    """Return the first sentence of a key's documentation."""
    text = meaning(path)
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def example_section(section: type[BaseModel]) -> dict[str, Any]:
    """Return the smallest valid values of a section: its required keys, at 1."""
    return {name: 1 for name, info in section.model_fields.items() if info.is_required()}


def groups() -> Mapping[str, str]:
    """Return group -> the documentation of its section."""
    out = {}
    for group in GROUPS:
        text = " ".join((getattr(section_of(group), "__doc__", "") or "").split())
        out[group] = text.partition(": ")[2] or text
    return out


def _split(annotation: Any) -> tuple[bool, str]:
    parts = list(_alternatives(annotation))
    words = [_words(part) for part in parts if part is not NoneType]
    return NoneType in parts, " or ".join(dict.fromkeys(words))


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inside))
    if origin is tuple:
        items = [_split(part)[1] for part in inside if part is not Ellipsis]
        # A tuple with dots in its type takes any number of items.
        many = "any number of" if Ellipsis in inside else str(len(items))
        return f"a list of {many} values, each {items[0]}"
    if origin is dict:
        return (
            f"a mapping from {_words(inside[0]).removeprefix('one of ')} to {_split(inside[1])[1]}"
        )
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping of keys"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _annotated(annotation: Any) -> list[Any]:
    """Return the limits inside an annotation."""
    out: list[Any] = []
    if get_origin(annotation) is Annotated:
        out += get_args(annotation)[1:]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            out += _annotated(part)
    return out


def _bounds(metadata: Any) -> Iterator[str]:
    for item in metadata:
        for name, words in _BOUNDS.items():
            if getattr(item, name, None) is not None:
                yield f"{words} {getattr(item, name)}"
        yield from _bounds(getattr(item, "metadata", ()))


def _as_data(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


@cache
def documented() -> type[UnresolvedRun]:
    """Return the schema with the text below each field as its `description`."""
    sections = list(dict.fromkeys(_sections(UnresolvedRun)))
    for section in sections:
        of_module = _texts(section.__module__)
        words = {
            name: text
            for base in section.__mro__
            for name, text in of_module.get(base.__name__, {}).items()
        }
        for name, field in section.model_fields.items():
            field.description = words.get(name, field.description)
    for section in sections:  # inner ones first: the outer ones contain what they were built to
        section.model_rebuild(force=True)
    return UnresolvedRun


def _sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in section.model_fields.values():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from _sections(inner)
    yield section


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the text below it, for one module."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_under(node)) for node in classes}


def _under(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in pairwise(node.body):
        text = after.value if isinstance(after, ast.Expr) else None
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Constant)
            and isinstance(text.value, str)
        ):
            yield field.target.id, inspect.cleandoc(text.value)
