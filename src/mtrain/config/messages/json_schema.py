"""JSON Schema draft-07 for editors (yaml-language-server reads it), of a group, a recipe or a run
file.

It is derived from the pydantic schemas, so an editor completes and documents a new key at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema, TupleSchema

from mtrain.config.compose.layout_string import GRAMMAR
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.messages.describe import documented
from mtrain.config.schema.run import GROUPS, UnresolvedRun

DRAFT = "http://json-schema.org/draft-07/schema#"
COMMENT = "made by `mtrain schema`; make it again after an update"
KINDS = ("run", "recipe", *GROUPS)
"""The kinds of files that have a schema."""

LAYOUT = r"^((vpp|etp|tp|pp|cp|ep|dp)[1-9][0-9]{0,5}|sp)+$"
REFERENCE = {
    "type": "string",
    "pattern": r"^\$\{[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*\}$",
    "description": "The value of another key, as in ${trainer.train_iters}.",
}

Json = dict[str, Any]


def json_schema(kind: str) -> Json:
    """Return the draft-07 schema of `run`, `recipe` or a group.

    A run file has every group; a recipe has any keys, choices and its own metadata; a group file
    has the keys of its group.

    Raises:
        KeyError: the kind is unknown.
    """
    if kind == "recipe":
        return _finished(_recipe(), "A recipe of mtrain: choices, values, and words about itself.")
    model: Any = UnresolvedRun if kind == "run" else UnresolvedRun.model_fields[kind].annotation
    words = "A resolved run of mtrain: run=FILE repeats it." if kind == "run" else ""
    return _finished(_schema_of(model), words)


def _finished(schema: Json, words: str) -> Json:
    head = {"$schema": DRAFT, "$comment": COMMENT}
    return {**head, **schema, "description": words or schema.get("description", "")}


class _Draft07(GenerateJsonSchema):
    """pydantic's schema (2020-12) in the words of draft-07."""

    def tuple_schema(self, schema: TupleSchema) -> Json:
        made = super().tuple_schema(schema)
        if "prefixItems" in made:
            made |= {"items": made.pop("prefixItems"), "additionalItems": False}
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        # pydantic would repeat the name of each key as its title, which editors show first.
        return False

    def model_schema(self, schema: ModelSchema) -> Json:
        made = super().model_schema(schema)
        del made["title"]
        made["properties"] = {name: _described(part) for name, part in made["properties"].items()}
        return _described(made)


def _described(part: Json) -> Json:
    """Return a part of a schema with a one-line description, and any reference in `allOf`."""
    words = " ".join(part["description"].split()) if "description" in part else None
    described = part if words is None else {**part, "description": words}
    # Next to `$ref`, draft-07 ignores every other word, the description included.
    if "$ref" in described and len(described) > 1:
        return {"allOf": [{"$ref": described.pop("$ref")}], **described}
    return described


def _schema_of(model: type[BaseModel]) -> Json:
    documented()
    schema = model.model_json_schema(
        ref_template="#/definitions/{model}", schema_generator=_Draft07
    )
    if "$defs" in schema:
        schema["definitions"] = dict(sorted(schema.pop("$defs").items()))
    return schema


def _recipe() -> Json:
    """Return the schema of a recipe, in which a value may be a reference to another key."""
    whole = _schema_of(UnresolvedRun)
    definitions = {name: _partial(section) for name, section in whole["definitions"].items()}
    definitions |= {"RecipeConfig": whole["definitions"]["RecipeConfig"], "Reference": REFERENCE}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "recipe": {"$ref": "#/definitions/RecipeConfig"},
            "defaults": _choices(),
            **{group: whole["properties"][group] for group in GROUPS},
        },
        "definitions": definitions,
    }


def _partial(section: Mapping[str, Any]) -> Json:
    """Return the schema of a section of which a file may set any part."""
    out = {key: value for key, value in section.items() if key != "required"}
    out["properties"] = {
        name: _or_reference(part) for name, part in section.get("properties", {}).items()
    }
    return out


def _or_reference(part: Json) -> Json:
    """Return the schema of a value or `${another.key}`; sections and free text stay."""
    inner = [part, *part.get("anyOf", ()), *part.get("allOf", ())]
    # Text already accepts `${...}`, and a mapping cannot be a reference.
    if any(
        "$ref" in item or (item.get("type") == "string" and "enum" not in item) for item in inner
    ):
        return part
    words: Json = {key: part[key] for key in ("description", "default") if key in part}
    rest = {key: value for key, value in part.items() if key not in words}
    kinds = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {"anyOf": [*kinds, {"$ref": "#/definitions/Reference"}], **words}


def _choices() -> Json:
    """Return the schema of the list `defaults`: a file for each group."""
    properties: Json = {}
    for group in GROUPS:
        files: Json = {"enum": choices_of_group(group)}
        layout = {"type": "string", "pattern": LAYOUT, "description": GRAMMAR}
        properties[f"override /{group}"] = (
            {"anyOf": [files, layout]} if group == "parallel" else files
        )
    entry = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": properties,
        "patternProperties": {f"^override +({'|'.join(GROUPS)})$": {"type": "string"}},
    }
    return {
        "type": "array",
        "items": entry,
        "description": "Which file of a group: `- override /model: llama3_8b`.",
    }
