"""A run whose steps take a quarter of a second, most of it asleep: `python -m tests.faults.pace
WORDS` is `mtrain WORDS` at that pace.

A soak has as many steps as fit into its time. At this pace they cost few cycles, and the run
without faults, which needs the same steps, is over in a fraction of the time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

STEP_S = 0.25


def pace() -> None:
    """Give each step of every rank that this process forks, or is, at least `STEP_S`."""
    from mtrain.goodput.meter import Meter

    stepped = Meter.stepped

    def later(meter: Meter, *args: Any) -> None:
        now = time.monotonic()
        since = getattr(meter, "paced", now - STEP_S)
        time.sleep(max(0.0, since + STEP_S - now))
        meter.paced = time.monotonic()  # type: ignore[attr-defined]
        stepped(meter, *args)

    Meter.stepped = later  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    pace()
    from mtrain.cli.main import main

    raise SystemExit(main(sys.argv[1:]))
