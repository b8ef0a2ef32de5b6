"""One mended defect of megatron-core."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Where = Literal["everywhere", "without TransformerEngine", "off CUDA"]


@dataclass(frozen=True, slots=True)
class Fix:
    """One mended defect."""

    name: str
    """What tests and messages call it."""
    where: str
    """File under megatron/core and line in 0.16.1."""
    reason: str
    """What is wrong, and what happens without the fix."""
    applies: Where
    """Where it is needed."""
    apply: Callable[[], None]
    """Mends it in this process."""


def core(module: str) -> Any:
    """The module of that name under megatron.core."""
    return importlib.import_module(f"megatron.core.{module}")
