"""The part of JSON Schema draft-07 that our schemas use, as a validator: for machines without
`jsonschema`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_WORDS = """
    $schema $comment $ref definitions description default type enum const properties required
    additionalProperties
    patternProperties propertyNames minProperties maxProperties items additionalItems minItems
    maxItems minimum
    maximum exclusiveMinimum exclusiveMaximum minLength maxLength pattern anyOf allOf
"""
KNOWN = frozenset(_WORDS.split())
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def unknown_words(schema: Any, path: str = "#") -> Iterator[str]:
    """Yield words of a schema that draft-07 lacks or that this validator ignores."""
    if isinstance(schema, bool):
        return
    for key, value in schema.items():
        where = f"{path}/{key}"
        if key not in KNOWN:
            yield where
        elif key in ("properties", "definitions", "patternProperties"):
            for name, inner in value.items():
                yield from unknown_words(inner, f"{where}/{name}")
        elif key in ("anyOf", "allOf") or (key == "items" and isinstance(value, list)):
            for index, inner in enumerate(value):
                yield from unknown_words(inner, f"{where}/{index}")
        elif key in ("items", "additionalProperties", "additionalItems", "propertyNames"):
            yield from unknown_words(value, where)
    if "$ref" in schema and len(schema) > 1:
        yield f"{path}: draft-07 ignores words next to $ref"


def errors(value: Any, schema: Any, root: Any | None = None, path: str = "") -> list[str]:
    """Return the errors of `value` under a schema."""
    root = root if root is not None else schema
    if isinstance(schema, bool):
        return [] if schema else [f"{path}: nothing is allowed here"]
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return errors(value, target, root, path)
    out = [*_simple(value, schema, path)]
    for inner in schema.get("allOf", ()):
        out += errors(value, inner, root, path)
    if "anyOf" in schema and all(errors(value, inner, root, path) for inner in schema["anyOf"]):
        out.append(f"{path}: {value!r} matches no alternative")
    if isinstance(value, dict):
        out += _object(value, schema, root, path)
    if isinstance(value, list):
        out += _array(value, schema, root, path)
    return out


def _simple(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        limits: dict[str, Any] = {"minimum": value.__ge__, "maximum": value.__le__}
        limits |= {"exclusiveMinimum": value.__gt__, "exclusiveMaximum": value.__lt__}
        for name, holds in limits.items():
            if name in schema and holds(type(value)(schema[name])) is False:
                yield f"{path}: {value} breaks {name} {schema[name]}"


def _object(value: dict[str, Any], schema: dict[str, Any], root: Any, path: str) -> list[str]:
    out = [f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        out.append(f"{path}: {len(value)} keys")
    for name, item in value.items():
        inner = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        inner += [
            part
            for pattern, part in schema.get("patternProperties", {}).items()
            if re.search(pattern, name)
        ]
        if not inner and "additionalProperties" in schema:
            inner = [schema["additionalProperties"]]
        out += [e for part in inner for e in errors(item, part, root, f"{path}.{name}")]
        if "propertyNames" in schema:
            out += errors(name, schema["propertyNames"], root, f"{path}.{name}")
    return out


def _array(value: list[Any], schema: dict[str, Any], root: Any, path: str) -> list[str]:
    out = []
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        out.append(f"{path}: {len(value)} items")
    items = schema.get("items", True)
    for index, item in enumerate(value):
        if isinstance(items, list):
            part = items[index] if index < len(items) else schema.get("additionalItems", True)
        else:
            part = items
        out += errors(item, part, root, f"{path}[{index}]")
    return out
