"""What an entry of the list of patched defects says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mtrain.config.engine.release import EVERY, Versions

Where = Literal["everywhere", "without TransformerEngine", "off CUDA"]
NO_TE: Where = "without TransformerEngine"


@dataclass(frozen=True, slots=True)
class Patch:
    """A patched defect."""

    name: str
    """What tests and messages call it."""
    where: str
    """File under megatron/core and line in 0.16.1."""
    reason: str
    """What is wrong, and what happens without the patch."""
    applies: Where
    """Where it is needed."""
    apply: Callable[[], None]
    """Patches it in this process."""
    versions: Versions = EVERY
    """The releases that have the defect."""
    upstream: str = ""
    """Number of the change to Megatron-LM that mends it, as far as it is known."""
