"""Known silent bugs of megatron-core 0.16.1 and of similar systems, and how mtrain handles each.

The table is data, in `known_bugs.json`. Those of megatron-core were looked up in the sources of
0.16.1 and 0.19.2. `engines --fixes` prints the table; a test checks every name in it, and that each
of its patches has a case that fails without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

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
    """True if 0.19.2 has the change; None: its code was rewritten, and a reading was inconclusive.
    """


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """Read the table, in the order in which it is printed."""
    rows = json.loads(Path(__file__).with_name("known_bugs.json").read_text("utf-8"))
    return tuple(KnownBug(**row) for row in rows)
