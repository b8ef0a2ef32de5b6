"""Stalls a rank's device in the middle of training; Python imports this when the folder is on
PYTHONPATH.

`FIRST_TOUCH_STALL_S` seconds after a rank has joined the others, its stream gets a kernel that
takes longer than any run. The next collective waits for it: what a broken link or a peer that is
gone looks like, on one card.
"""

from __future__ import annotations

import os
import sys
import threading
import time

CYCLES = 1 << 44
"""Cycles of the device's clock: some hours."""


def _stall(after_s: float) -> None:
    while True:
        time.sleep(0.1)
        torch = sys.modules.get("torch")
        distributed = getattr(torch, "distributed", None)
        initialized = getattr(distributed, "is_initialized", None)
        if initialized is not None and initialized():
            break
    time.sleep(after_s)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda._sleep(CYCLES)


if "FIRST_TOUCH_STALL_S" in os.environ:
    threading.Thread(
        target=_stall, args=(float(os.environ["FIRST_TOUCH_STALL_S"]),), daemon=True
    ).start()
