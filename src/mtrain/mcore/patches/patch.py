"""The description of a patched defect, and the decorator that makes a function its patch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mtrain.config.engine.release import EVERY, Versions

Where = Literal["everywhere", "without TransformerEngine", "off CUDA"]
NO_TE: Where = "without TransformerEngine"


@dataclass(frozen=True, slots=True)
class Patch:
    """A patched defect."""

    name: str
    """Name in tests and messages."""
    where: str
    """File under megatron/core and line in 0.16.1."""
    reason: str
    """The defect, and its effect without the patch."""
    applies: Where
    """Environments that need the patch."""
    apply: Callable[[], None]
    """Patches it in this process."""
    versions: Versions = EVERY
    """The releases that have the defect."""
    upstream: str = ""
    """Number of the change to Megatron-LM that mends it, as far as it is known."""


def patch(
    name: str,
    where: str,
    reason: str,
    applies: Where,
    versions: Versions = EVERY,
    upstream: str = "",
) -> Callable[[Callable[[], None]], Patch]:
    """Make the decorated function, which changes megatron-core in this process, a `Patch`."""

    def of(apply: Callable[[], None]) -> Patch:
        return Patch(name, where, reason, applies, apply, versions, upstream)

    return of


def core(module: str) -> Any:
    """Import a module of megatron.core."""
    # Imported when a patch is applied: the adapter rewrites modules as they load, so none may load
    # before it.
    return importlib.import_module(f"megatron.core.{module}")
