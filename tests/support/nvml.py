"""A library of NVIDIA's driver that is no driver: what `libnvidia-ml.so.1` says, by C's calling
convention.

Its functions are Python's, behind pointers of C. Whoever calls them by ctypes passes the same bytes
as to the real library, and no test needs a compiler.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_int, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

NAME = "libnvidia-ml.so.1"
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
GPUS = 2
LINKS = 18
INSTANCES = (0, 3)
"""The indices of the instances of the second GPU, where it is partitioned."""
FIRST_HANDLE = 1 << 40
"""Handles are pointers: one that is passed as an int of C loses its upper half."""
FIRST_INSTANCE = 10
MIB = 1 << 20
SITE = f"""
import ctypes

real = ctypes.CDLL


class CDLL(real):
    def __new__(cls, name=None, *args, **kwargs):
        if name == {NAME!r}:
            from tests.support.nvml import Library

            return Library()
        return super().__new__(cls)


ctypes.CDLL = CDLL
"""


class _Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class _Process(Structure):
    _fields_ = [("pid", c_uint), ("bytes", c_ulonglong), ("gi", c_uint), ("ci", c_uint)]


_FUNCTIONS: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {}
"""Name -> the function, which gets the library first, and the kinds of its arguments in C."""


def _exported(name: str, *kinds: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def keep(function: Callable[..., int]) -> Callable[..., int]:
        _FUNCTIONS[name] = (function, kinds)
        return function

    return keep


class Library:
    """The library, loaded: two H200, the second of them partitioned where FAKE_MIG is set.

    FAKE_NO_DRIVER, FAKE_CUDA, FAKE_NAME, FAKE_USED_MIB and FAKE_PID in the environment change what
    it says; FAKE_SLOWING, FAKE_UNCORRECTED, FAKE_FAILED_ROWS and FAKE_LINKS_UP the state of the
    second GPU.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.kept: list[Any] = []
        """Pointers to functions, which C would outlive."""

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        function, kinds = _FUNCTIONS[name]

        def call(*arguments: Any) -> int:
            if not self.opened and name != "nvmlInit_v2":
                return UNINITIALIZED
            return function(self, *arguments)

        pointer = CFUNCTYPE(c_int, *kinds)(call)
        self.kept.append(pointer)
        # Without the kinds of arguments, ctypes passes them as it does to a function of a library
        # that it has loaded.
        return CFUNCTYPE(c_int)(ctypes.cast(pointer, c_void_p).value or 0)


def site(folder: Path) -> Path:
    """Make a folder for PYTHONPATH; a Python with it loads this library in place of the
    driver's.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


def _said(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _write(text: Any, size: int, said: str) -> int:
    data = said.encode() + b"\0"
    if len(data) > size:
        return INSUFFICIENT_SIZE
    ctypes.memmove(text, data, len(data))
    return 0


def _number(handle: int) -> int:
    return handle - FIRST_HANDLE


@_exported("nvmlInit_v2")
def _init(library: Library) -> int:
    library.opened += 1
    return DRIVER_NOT_LOADED if "FAKE_NO_DRIVER" in os.environ else 0


@_exported("nvmlShutdown")
def _shutdown(library: Library) -> int:
    library.opened -= 1
    return 0


@_exported("nvmlSystemGetDriverVersion", POINTER(c_char), c_uint)
def _driver_version(library: Library, text: Any, size: int) -> int:
    return _write(text, size, "580.159.01")


@_exported("nvmlSystemGetCudaDriverVersion_v2", POINTER(c_int))
def _cuda(library: Library, found: Any) -> int:
    found[0] = _said("FAKE_CUDA", 13_000)
    return 0


@_exported("nvmlDeviceGetCount_v2", POINTER(c_uint))
def _count(library: Library, count: Any) -> int:
    count[0] = GPUS
    return 0


@_exported("nvmlDeviceGetHandleByIndex_v2", c_uint, POINTER(c_void_p))
def _handle(library: Library, index: int, handle: Any) -> int:
    if index >= GPUS:
        return INVALID_ARGUMENT
    handle[0] = FIRST_HANDLE + index
    return 0


@_exported("nvmlDeviceGetName", c_void_p, POINTER(c_char), c_uint)
def _name(library: Library, handle: int, text: Any, size: int) -> int:
    name = os.environ.get("FAKE_NAME", "NVIDIA H200")
    return _write(text, size, name if _number(handle) < GPUS else f"{name} MIG 1g.18gb")


@_exported("nvmlDeviceGetUUID", c_void_p, POINTER(c_char), c_uint)
def _uuid(library: Library, handle: int, text: Any, size: int) -> int:
    number = _number(handle)
    kind = "GPU" if number < GPUS else "MIG"
    return _write(text, size, f"{kind}-{str(number) * 4}-af")


@_exported("nvmlDeviceGetCudaComputeCapability", c_void_p, POINTER(c_int), POINTER(c_int))
def _capability(library: Library, handle: int, major: Any, minor: Any) -> int:
    if _number(handle) >= GPUS:
        return NOT_SUPPORTED
    major[0] = 9
    minor[0] = 0
    return 0


@_exported("nvmlDeviceGetMemoryInfo", c_void_p, POINTER(_Memory))
def _memory(library: Library, handle: int, memory: Any) -> int:
    total = (143_771 if _number(handle) < GPUS else 16_384) * MIB
    used = _said("FAKE_USED_MIB", 0) * MIB
    memory[0] = _Memory(total, total - used, used)
    return 0


@_exported("nvmlDeviceGetMigMode", c_void_p, POINTER(c_uint), POINTER(c_uint))
def _mig_mode(library: Library, handle: int, current: Any, pending: Any) -> int:
    enabled = _number(handle) == 1 and "FAKE_MIG" in os.environ
    current[0] = enabled
    pending[0] = enabled
    return 0


@_exported("nvmlDeviceGetMaxMigDeviceCount", c_void_p, POINTER(c_uint))
def _most_instances(library: Library, handle: int, count: Any) -> int:
    count[0] = 7
    return 0


@_exported("nvmlDeviceGetMigDeviceHandleByIndex", c_void_p, c_uint, POINTER(c_void_p))
def _instance(library: Library, handle: int, index: int, found: Any) -> int:
    if index not in INSTANCES:
        return NOT_FOUND
    found[0] = FIRST_HANDLE + FIRST_INSTANCE + index
    return 0


@_exported("nvmlDeviceGetComputeRunningProcesses_v3", c_void_p, POINTER(c_uint), POINTER(_Process))
def _processes(library: Library, handle: int, count: Any, found: Any) -> int:
    pid = _said("FAKE_PID", 0)
    if not pid:
        count[0] = 0
        return 0
    room = count[0]
    count[0] = 2
    if room < 2:
        return INSUFFICIENT_SIZE
    for i in range(2):
        found[i] = _Process(pid + i, 1 << 30, 0, 0)
    return 0


def _of_second(handle: int, name: str, usual: int) -> int:
    return _said(name, usual) if _number(handle) == 1 else usual


@_exported("nvmlDeviceGetClockInfo", c_void_p, c_uint, POINTER(c_uint))
def _clock(library: Library, handle: int, kind: int, found: Any) -> int:
    found[0] = 1755 if kind == 1 else 2619
    return 0


@_exported("nvmlDeviceGetMaxClockInfo", c_void_p, c_uint, POINTER(c_uint))
def _most_clock(library: Library, handle: int, kind: int, found: Any) -> int:
    found[0] = 1980
    return 0


@_exported("nvmlDeviceGetCurrentClocksThrottleReasons", c_void_p, POINTER(c_ulonglong))
def _reasons(library: Library, handle: int, found: Any) -> int:
    found[0] = _of_second(handle, "FAKE_SLOWING", 0x1)
    return 0


@_exported("nvmlDeviceGetTemperature", c_void_p, c_uint, POINTER(c_uint))
def _temperature(library: Library, handle: int, sensor: int, found: Any) -> int:
    found[0] = 41
    return 0


@_exported("nvmlDeviceGetEnforcedPowerLimit", c_void_p, POINTER(c_uint))
def _power_limit(library: Library, handle: int, found: Any) -> int:
    found[0] = 700_000
    return 0


@_exported("nvmlDeviceGetEccMode", c_void_p, POINTER(c_uint), POINTER(c_uint))
def _ecc_mode(library: Library, handle: int, current: Any, pending: Any) -> int:
    current[0] = 1
    pending[0] = 1
    return 0


@_exported("nvmlDeviceGetTotalEccErrors", c_void_p, c_uint, c_uint, POINTER(c_ulonglong))
def _ecc_errors(library: Library, handle: int, kind: int, counter: int, found: Any) -> int:
    # Corrected errors are usual, and so are old ones.
    found[0] = _of_second(handle, "FAKE_UNCORRECTED", 0) if (kind, counter) == (1, 0) else 99
    return 0


@_exported("nvmlDeviceGetRemappedRows", c_void_p, *[POINTER(c_uint)] * 4)
def _remapped(library: Library, handle: int, *found: Any) -> int:
    numbers = (5, 0, 0, _of_second(handle, "FAKE_FAILED_ROWS", 0))
    for place, number in zip(found, numbers, strict=True):
        place[0] = number
    return 0


@_exported("nvmlDeviceGetNvLinkState", c_void_p, c_uint, POINTER(c_uint))
def _link(library: Library, handle: int, link: int, active: Any) -> int:
    if link >= LINKS:
        return INVALID_ARGUMENT
    active[0] = link < _of_second(handle, "FAKE_LINKS_UP", LINKS)
    return 0


@_exported("nvmlDeviceGetTopologyCommonAncestor", c_void_p, c_void_p, POINTER(c_uint))
def _ancestor(library: Library, one: int, other: int, level: Any) -> int:
    level[0] = 50
    return 0
