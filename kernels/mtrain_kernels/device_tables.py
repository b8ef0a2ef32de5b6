"""Small tables of integers that kernels read on a device: made once for each content, without
waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_READ_BY_GRAPHS: list[Tensor] = []
"""Sources that CUDA graphs copy from or read at every replay; they are kept because no signal tells
when the last graph is gone.
"""


class DeviceTables:
    """Tables by key and device. Of more than `most` those met longest ago go.

    While a CUDA graph is captured, a table that is found is kept for ever, as the graph reads it.
    One that is made then is written when the graph runs: it stays with what it is copied from, and
    nobody else gets it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[torch.device, Hashable], Tensor] = {}

    def of(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return the table of a key on a device, made on the host by `make` where it is
        not known.
        """
        captured = capturing(device)
        # Taken out and put back at the end, which keeps the dict in order of use.
        table = self._known.pop((device, key), None)
        if table is None:
            host = make()
            # Only from pinned memory does a copy run without the host waiting for it.
            host = host.pin_memory() if device.type == "cuda" else host
            table = host.to(device, non_blocking=True)
            if captured:
                _READ_BY_GRAPHS.extend((host, table))
                return table
            if len(self._known) >= self._most:
                self._known.pop(next(iter(self._known)), None)
        elif captured:
            _READ_BY_GRAPHS.append(table)
        self._known[device, key] = table
        return table


def capturing(device: torch.device) -> bool:
    """Return whether a launch now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
