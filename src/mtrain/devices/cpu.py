"""The CPU as a device: gloo between ranks, host memory, one generator for everything."""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from mtrain.devices import cpu_namespace
from mtrain.devices.base import Device

# ru_maxrss is in bytes on macOS and in KiB on Linux.
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def _memory_stats() -> dict[str, int]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
    now = psutil.Process().memory_info().rss
    # The kernel may update its peak later than the current size.
    return {"allocated_bytes": now, "peak_bytes": max(peak, now)}


CPU = Device(
    name="cpu",
    torch_type="cpu",
    type_prefix="torch.",
    backend="gloo",
    namespace=cpu_namespace,
    pin_memory=False,
    runs_ahead=False,
    available=lambda: None,
    count=lambda: None,
    device=lambda _: torch.device("cpu"),
    set_index=lambda _: None,
    synchronize=lambda: None,
    memory_stats=_memory_stats,
    seed=cpu_namespace.manual_seed,
    rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)
