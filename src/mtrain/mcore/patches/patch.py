"""The description of a patched defect, the decorator that makes a function its patch, and the
table of known silent bugs.

The table is data, in `known_bugs.json`: bugs of megatron-core 0.16.1 and of similar systems, and
how mtrain handles each. Those of megatron-core were looked up in the sources of 0.16.1 and 0.19.2.
`engines --fixes` prints the table; a test checks every name in it, and that each of its patches
has a case that fails without it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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


Became = Literal["patched", "refused", "out of reach", "kept by tests"]
BROUGHT_BACK = "tests/distributed/test_known_bugs.py"
"""The test that brings back bugs which no patch and no rule prevents."""


@dataclass(frozen=True, slots=True)
class KnownBug:
    """A row of the table."""

    number: str
    """Number of the change or the issue, in Megatron-LM where no other project is named."""
    about: str
    became: Became
    by: str = ""
    """The patch, the code of the rule, or the test; empty if our paths do not reach the bug."""
    why: str = ""
    """Reason why our paths do not reach the bug, or the safeguard that keeps them away."""
    where: str = ""
    """File under megatron/core and line in 0.16.1; empty if it is not in megatron-core."""
    is_in_0_19: bool | None = None
    """True if 0.19.2 has the change; None: its code was rewritten, and unclear."""


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """Read the table, in the order in which it is printed."""
    rows = json.loads(Path(__file__).with_name("known_bugs.json").read_text("utf-8"))
    return tuple(KnownBug(**row) for row in rows)
