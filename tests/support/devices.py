"""The CPU in the place of a device that works behind the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch


def stand_in(counts: Counter[str]) -> Any:
    """Return the CPU as a device that works behind the host, and counts the host's requests to it.

    As on CUDA, the time between two events is known only once the host has waited for one that is
    no earlier.
    """
    from mtrain.devices import cpu_namespace
    from mtrain.devices.cpu import CPU

    recorded = count(1)
    passed = [0]

    class Event(cpu_namespace.Event):
        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.number = next(recorded)

        def synchronize(self) -> None:
            counts["event"] += 1
            passed[0] = max(passed[0], self.number)

        def elapsed_time(self, end: Any) -> float:
            assert max(self.number, end.number) <= passed[0], "device not ready"
            return super().elapsed_time(end)

    def pinned(size: int) -> torch.Tensor:
        counts["pinned"] += 1
        return torch.full((size,), 255, dtype=torch.uint8)

    def synchronize() -> None:
        counts["device"] += 1

    namespace = SimpleNamespace(**(vars(cpu_namespace) | {"Event": Event}))
    return dataclasses.replace(
        CPU,
        namespace=namespace,
        runs_ahead=True,
        pin_memory=True,
        pinned=pinned,
        synchronize=synchronize,
    )
