"""The folder of weights that a command line begins with, as it stands in values that are not
composed yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

KEY = "checkpoint.init_from"


def at(values: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    node: Any = values
    for name in path.split(".") if path else ():
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def start_of(
    settings: Mapping[str, Any], recipe: Mapping[str, Any], choice: Mapping[str, Any]
) -> str | None:
    """Return the folder that the command line names, else the recipe, else the choice of
    `checkpoint`; None: none does.
    """
    if KEY in settings:
        found = settings[KEY]
    else:
        found = at(recipe, KEY) or choice.get("init_from")
    return found if isinstance(found, str) and found else None


def describes_a_model(recipe: Mapping[str, Any], needed: Collection[str]) -> bool:
    """Return whether a recipe states every key that a model cannot be without."""
    stated = recipe.get("model")
    return isinstance(stated, Mapping) and stated.keys() >= set(needed)
