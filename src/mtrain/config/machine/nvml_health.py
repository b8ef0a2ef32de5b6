"""The state of NVIDIA's GPUs, by their driver's library: clocks, reasons for low clocks, errors of
memory, links and topology.

Numbers are those of `nvml.h`. A function that a GPU or an older driver lacks leaves its fact
unknown (None).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field

from mtrain.config.machine.nvml import Calls, Failed, answer_or, of_library, opened

SM_CLOCK = 1
UNCORRECTED = 1
SINCE_RESET = 0
MOST_LINKS = 18
"""Links that the library numbers on one GPU."""
SLOWING = {
    0x8: "a hardware slowdown",
    0x20: "the driver's temperature limit",
    0x40: "the hardware's temperature limit",
    0x80: "the power brake of the machine",
}
"""Bit -> reason for clocks below those requested, without the usual ones (idle, the power cap)."""
LEVELS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "several NUMA nodes",
}
"""Common ancestor of two GPUs -> its name, from near to far."""


@dataclass(frozen=True)
class GpuHealth:
    """The state of one GPU; None: unknown."""

    sm_mhz: int | None = None
    sm_most_mhz: int | None = None
    slowing: int | None = None
    """Bits of the reasons for its clocks; see `SLOWING`."""
    celsius: int | None = None
    power_limit_watts: float | None = None
    ecc: bool | None = None
    """True if its memory corrects errors."""
    uncorrected: int | None = None
    """Memory errors since the last reset that ECC could not correct."""
    rows_pending: bool | None = None
    """True if faulty rows of memory are replaced at the next reset."""
    rows_failed: bool | None = None
    """True if a faulty row could not be replaced."""
    links: int | None = None
    """NVLink connections that it has."""
    links_up: int | None = None
    pcie_lanes: int | None = None
    pcie_most_lanes: int | None = None


@dataclass(frozen=True)
class Health:
    """The state of the GPUs of a machine, in the order of their PCI addresses."""

    gpus: tuple[GpuHealth, ...] = field(default=())
    farthest: int | None = None
    """The farthest common ancestor of two GPUs; see `LEVELS`."""


def read() -> Health | None:
    """Return the state of this machine's GPUs; None without the driver's library."""
    return of_library(asked)


def asked(library: ctypes.CDLL) -> Health:
    """Query a loaded library.

    Raises:
        Failed: the library reaches no driver.
    """
    with opened(Calls(library)) as call:
        count = call.number("nvmlDeviceGetCount_v2", kind=c_uint)
        handles = list[c_void_p]()
        for index in range(count):
            with suppress(Failed):  # a lost GPU is missing from `Driver.gpus`, too
                handles.append(call.handle("nvmlDeviceGetHandleByIndex_v2", c_uint(index)))
        farthest = [
            level
            for i, one in enumerate(handles)
            for other in handles[:i]
            if (level := _level(call, one, other)) is not None
        ]
        gpus = tuple(_gpu(call, handle) for handle in handles)
        return Health(gpus, max(farthest, default=None))


def _gpu(call: Calls, handle: c_void_p) -> GpuHealth:
    def one(name: str, *before: int) -> int | None:
        def ask() -> int | None:
            return call.number(name, handle, *map(c_uint, before), kind=c_uint)

        return answer_or(None, ask)

    links, up = _links(call, handle)
    rows = _remapped(call, handle)
    watts = one("nvmlDeviceGetEnforcedPowerLimit")
    return GpuHealth(
        sm_mhz=one("nvmlDeviceGetClockInfo", SM_CLOCK),
        sm_most_mhz=one("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        slowing=_slowing(call, handle),
        celsius=one("nvmlDeviceGetTemperature", 0),
        power_limit_watts=None if watts is None else watts / 1000,
        ecc=_ecc(call, handle),
        uncorrected=_uncorrected(call, handle),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        links=links,
        links_up=up,
        pcie_lanes=one("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_most_lanes=one("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _slowing(call: Calls, handle: c_void_p) -> int | None:
    # renamed in CUDA 12.3; an older driver knows only the second name
    for name in ("EventReasons", "ThrottleReasons"):
        with suppress(Failed):
            return call.number(f"nvmlDeviceGetCurrentClocks{name}", handle, kind=c_ulonglong)
    return None


def _ecc(call: Calls, handle: c_void_p) -> bool | None:
    current = c_uint()
    pending = c_uint()
    with suppress(Failed):
        call("nvmlDeviceGetEccMode", handle, byref(current), byref(pending))
        return bool(current.value)
    return None


def _uncorrected(call: Calls, handle: c_void_p) -> int | None:
    kinds = (c_uint(UNCORRECTED), c_uint(SINCE_RESET))
    with suppress(Failed):
        return call.number("nvmlDeviceGetTotalEccErrors", handle, *kinds, kind=c_ulonglong)
    return None


def _remapped(call: Calls, handle: c_void_p) -> tuple[int, ...] | None:
    """Return rows remapped for correctable and uncorrectable errors, pending, and failed."""
    found = [c_uint() for _ in range(4)]
    with suppress(Failed):
        call("nvmlDeviceGetRemappedRows", handle, *map(byref, found))
        return tuple(number.value for number in found)
    return None


def _links(call: Calls, handle: c_void_p) -> tuple[int | None, int | None]:
    """Return the number of NVLink connections, and of those that work; None: it has none."""
    states = list[int]()
    for link in range(MOST_LINKS):
        with suppress(Failed):  # a number that this GPU does not have
            states.append(
                call.number("nvmlDeviceGetNvLinkState", handle, c_uint(link), kind=c_uint)
            )
    return (len(states), sum(states)) if states else (None, None)


def _level(call: Calls, one: c_void_p, other: c_void_p) -> int | None:
    with suppress(Failed):
        return call.number("nvmlDeviceGetTopologyCommonAncestor", one, other, kind=c_uint)
    return None
