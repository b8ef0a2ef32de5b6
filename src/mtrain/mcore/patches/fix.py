"""What a row of the table of known bugs says, and reasons that several rows share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Became = Literal["patched", "refused", "out of reach", "kept by tests"]


@dataclass(frozen=True, slots=True)
class Fix:
    """One row."""

    number: str
    """Of the change or the issue, in Megatron-LM where no other project is named."""
    about: str
    became: Became
    by: str
    """The patch, the code of the rule, or the test; empty for what is out of reach."""
    why: str
    """Why our paths do not reach it, or what keeps it away."""
    where: str = ""
    """File under megatron/core and line in 0.16.1; empty for what is no code of megatron-core."""
    is_in_0_19: bool | None = None
    """Whether 0.19.2's source has the change; None: its code was rewritten, and reading did not
    tell.
    """


OWN_STORE = (
    "no checkpoint of ours is written or read by megatron-core's optimizers: ckpt/state.py does it"
    " by weight"
)
NOT_OFFERED = "no key feeds it: "
LAYOUTS = "tests/distributed/test_layouts_are_proven.py"
FULLY_SHARDED = "tests/distributed/test_fully_sharded.py"
BROUGHT_BACK = "tests/distributed/test_known_bugs_are_found.py"
MOE = "transformer/moe"
OPTIM = "optimizer/distrib_optimizer.py"
