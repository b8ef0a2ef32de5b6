"""The keys that the classes of transformers read in a `config.json`, and their meaning of null: a
table of their source.

The table is generated (`python -m tests.support.hf_classes`), and a test makes it again from the
installed release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("classes.json")


@dataclass(frozen=True)
class Class:
    """A configuration class and the models that are made of it."""

    name: str
    read: frozenset[str]
    """Keys that it reads, of those that any class declares."""
    null: Mapping[str, str]
    """Key -> the meaning of null: `refused`, `absent` (as if left out), `filled` (with another
    value), `false`, or `nothing`.
    """
    declared: frozenset[str]
    """Keys that the class of any kind declares or reads."""

    def ignores(self, key: str) -> bool:
        """Return whether other classes read a key, and this one does not."""
        return key in self.declared and key not in self.read


@cache
def classes() -> dict[str, Class]:
    """Return every class by its `model_type`."""
    kinds: dict[str, Any] = json.loads(TABLE.read_text("utf-8"))["kinds"]
    declared = frozenset(key for one in kinds.values() for key in one["read"])
    return {
        kind: Class(
            one["class"],
            frozenset(one["read"]),
            {key: meaning for meaning, keys in one["null"].items() for key in keys},
            declared,
        )
        for kind, one in kinds.items()
    }


def class_of(kind: str, values: Mapping[str, Any]) -> Class | None:
    """Return the class that reads a file of a `model_type`; None if the table lacks it."""
    # AutoConfig's own rule: a Mistral with layer_types is a Ministral
    by_layer = kind == "mistral" and (
        "layer_types" in values or values.get("model_type") == "ministral"
    )
    return classes().get("ministral" if by_layer else kind)
