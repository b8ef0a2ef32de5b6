"""The device that stages of `first_touch.py` work on, and what cannot be done without one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from first_touch_results import Walk


class Skipped(Exception):
    """A unit that cannot be done here, and why."""


def poisoned() -> bool:
    """Return whether the device no longer answers, as after an access outside of its memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return True
    return False


def device_here() -> Any:
    """Return the GPU of this process, or the CPU without a GPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def needs_device(walk: Walk) -> None:
    """Raise `Skipped` where there is no GPU, but in a dry run."""
    if not walk.dry and device_here().type == "cpu":
        raise Skipped("there is no GPU here; --dry-run walks this on a CPU")
