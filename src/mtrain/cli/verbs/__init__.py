"""The verbs, one file each. To add a verb, add its file and its name here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain.cli.command import Paged

NAMES = (
    "train",
    "check",
    "show",
    "plan",
    "tune",
    "prove",
    "rehearse",
    "resume",
    "export",
    "convert",
    "generate",
    "evaluate",
    "data",
    "recipe",
    "choices",
    "schema",
    "engines",
    "completion",
    "explain",
)


@cache
def command_of(name: str) -> Paged:
    """Import the file of a verb and return its command, which has the name of the verb."""
    found: Paged = getattr(import_module(f"{__name__}.{name}"), name)
    return found
