"""The stages of `first_touch.py`, unit by unit; a unit returns JSON or raises `Skipped` with why
not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import first_touch_host
import first_touch_ops
import first_touch_runs
import first_touch_steps
import first_touch_train
from first_touch_device import device_here
from first_touch_results import ROOT, Walk

Units = dict[str, Callable[[], Any]]


def environment(walk: Walk, folder: Path) -> Units:
    """Record device, driver, memory, versions and commit of the machine before any run, so that
    every figure has its place.
    """

    def facts() -> dict[str, Any]:
        import torch
        from run import surroundings

        device = device_here()
        said = surroundings(device, torch.bfloat16)
        said["commit"] = _written_commit() or said["commit"]
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(0)
            free, total = torch.cuda.mem_get_info()
            said |= {
                "sm": 10 * facts.major + facts.minor,
                "processors": facts.multi_processor_count,
            }
            said |= {"free_bytes": free, "total_bytes": total, "cuda": torch.version.cuda}
        return said

    return {"machine": facts}


def _written_commit() -> str:
    """Return the commit of a copied tree, from a file COMMIT next to `launch.py`; empty without the
    file.

    It comes before what git says: a copy may lie inside of another repository.
    """
    path = ROOT / "COMMIT"
    return path.read_text().strip() if path.exists() else ""


UNITS: dict[str, Callable[[Walk, Path], Units]] = {
    "environment": environment,
    "gate": first_touch_runs.gate,
    "steps": first_touch_steps.steps,
    "parity": first_touch_ops.parity,
    "runs": first_touch_runs.runs,
    "train": first_touch_train.train,
    "host": first_touch_host.host,
    "rivals": first_touch_train.rivals,
    "profile": first_touch_train.profile,
    "ops": first_touch_ops.measured,
    "autotune": first_touch_ops.autotune,
}
"""Stage -> its units for a walk."""
