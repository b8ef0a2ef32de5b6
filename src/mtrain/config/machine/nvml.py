"""NVIDIA's management library: the GPUs, the driver, how full their memory is, and the processes
that use them.

It creates no CUDA context, so a process may still fork after a query, and ranks that start later
find all memory free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import Structure, byref, c_char, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

# The name for the loader's search path, and the place where the driver of Windows puts it in WSL2.
LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
# Size of the library's longest texts: names and UUIDs.
TEXT_BYTES = 96
# The number of processes of a GPU in the first query.
USUAL_PROCESSES = 64
TRIES = 3
INSUFFICIENT_SIZE = 7
ENABLED = 1


@dataclass(frozen=True)
class Gpu:
    """A GPU or MIG instance as the driver describes it; 0 or empty: unknown."""

    name: str
    uuid: str = ""
    sm: int = 0
    """Compute capability without the dot."""
    memory_bytes: int = 0
    free_bytes: int = 0
    processes: tuple[int, ...] = ()
    """Ids of the processes that compute on it; in a container those of others are hidden."""
    instances: tuple[Gpu, ...] = ()
    """The instances of a GPU that is partitioned (MIG)."""
    partitioned: bool = False
    """CUDA shows its instances in place of the GPU, even where there are none."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver and its GPUs, in the order of their PCI addresses."""

    version: str
    cuda: tuple[int, int] | None
    """The newest CUDA that it serves, such as (13, 0); None: unknown."""
    gpus: tuple[Gpu, ...]


class Failed(Exception):
    """A function of the library that is missing, or did not succeed."""


class _Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class _Process(Structure):
    _fields_ = [
        ("pid", c_uint),
        ("bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


@cache
def driver() -> Driver | None:
    """Return the driver of this machine, queried once per process; None without a library."""
    return of_library(asked)


def of_library(query: Callable[[ctypes.CDLL], T]) -> T | None:
    """Return the answer of the driver's library; None without a library that reaches a driver."""
    for name in LIBRARIES:
        with suppress(OSError, Failed):
            return query(ctypes.CDLL(name))
    return None


def asked(library: ctypes.CDLL) -> Driver:
    """Query a loaded library; facts that a GPU does not report stay unknown.

    Raises:
        Failed: the library reaches no driver.
    """
    with opened(Calls(library)) as call:
        version = call.text("nvmlSystemGetDriverVersion")
        # Encoded as 1000 * major + 10 * minor.
        newest = answer_or(None, lambda: call.number("nvmlSystemGetCudaDriverVersion_v2"))
        cuda = None if newest is None else (newest // 1000, newest % 1000 // 10)
        count = call.number("nvmlDeviceGetCount_v2", kind=c_uint)
        gpus = list[Gpu]()
        for index in range(count):
            # one that is lost, or that a control group withholds, is of no use to CUDA either
            with suppress(Failed):
                gpus.append(_gpu(call, call.handle("nvmlDeviceGetHandleByIndex_v2", c_uint(index))))
        return Driver(version, cuda, tuple(gpus))


@contextmanager
def opened(call: Calls) -> Iterator[Calls]:
    """Open the library's connection to the driver, and close it at the end.

    Raises:
        Failed: the library reaches no driver.
    """
    call("nvmlInit_v2")
    try:
        yield call
    finally:
        with suppress(Failed):
            call("nvmlShutdown")


class Calls:
    """Functions of the library, each of which returns a number that is 0 where it succeeds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def status(self, name: str, *arguments: Any) -> int:
        """Return the number that a function returns; `Failed` if the library lacks it."""
        try:
            function = getattr(self.library, name)
        except AttributeError:  # of a newer driver
            raise Failed(name) from None
        return int(function(*arguments))

    def __call__(self, name: str, *arguments: Any) -> None:
        status = self.status(name, *arguments)
        if status:
            raise Failed(f"{name}: {status}")

    def text(self, name: str, *before: Any) -> str:
        """Return the text that a function writes."""
        text = (c_char * TEXT_BYTES)()
        self(name, *before, text, c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def number(self, name: str, *before: Any, kind: Any = c_int) -> int:
        """Return the number of a `kind` that a function writes."""
        found = kind()
        self(name, *before, byref(found))
        return int(found.value)

    def handle(self, name: str, *before: Any) -> c_void_p:
        """Return the handle that a function writes."""
        found = c_void_p()
        self(name, *before, byref(found))
        return found


def answer_or(other: T, ask: Callable[[], T]) -> T:
    """Return the driver's answer, or `other` if it has none."""
    try:
        return ask()
    except Failed:
        return other


def _gpu(call: Calls, handle: c_void_p, parent: Gpu | None = None) -> Gpu:
    memory = answer_or(_Memory(), lambda: _memory(call, handle))
    alone = Gpu(
        name=answer_or("", lambda: call.text("nvmlDeviceGetName", handle))
        or (parent.name if parent else ""),
        uuid=answer_or("", lambda: call.text("nvmlDeviceGetUUID", handle)),
        sm=parent.sm if parent else answer_or(0, lambda: _capability(call, handle)),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        processes=answer_or((), lambda: _processes(call, handle)),
    )
    # An instance of a partitioned GPU cannot be partitioned, and the driver has no answer for it.
    if parent is not None or not answer_or(False, lambda: _is_partitioned(call, handle)):
        return alone
    instances = list[Gpu]()
    most = answer_or(0, lambda: call.number("nvmlDeviceGetMaxMigDeviceCount", handle, kind=c_uint))
    for index in range(most):
        with suppress(Failed):  # an index that no instance has
            instance = call.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(index))
            instances.append(_gpu(call, instance, alone))
    return replace(alone, instances=tuple(instances), partitioned=True)


def _memory(call: Calls, handle: c_void_p) -> _Memory:
    memory = _Memory()
    call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
    return memory


def _capability(call: Calls, handle: c_void_p) -> int:
    major = c_int()
    minor = c_int()
    call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    return major.value * 10 + minor.value


def _is_partitioned(call: Calls, handle: c_void_p) -> bool:
    current = c_uint()
    pending = c_uint()
    call("nvmlDeviceGetMigMode", handle, byref(current), byref(pending))
    return current.value == ENABLED


def _processes(call: Calls, handle: c_void_p) -> tuple[int, ...]:
    """Return the ids of the processes that compute on a GPU."""
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    room = USUAL_PROCESSES
    for _ in range(TRIES):
        count = c_uint(room)
        found = (_Process * room)()
        status = call.status(name, handle, byref(count), found)
        if status == 0:
            return tuple(process.pid for process in found[: count.value])
        if status != INSUFFICIENT_SIZE:
            break
        room = count.value + USUAL_PROCESSES  # nothing was written, and more may have started since
    raise Failed(f"{name}: {status}")
