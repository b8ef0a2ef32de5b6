"""The binaries that launches need: recorded as they are looked up, or compiled ahead of them.

Triton compiles a kernel when it is launched, one at a time. A record of a launch has everything
that Triton compiles from, as JSON, so other processes can put the same binary into Triton's cache
before. Processes that need a binary at the same time compile it once: one holds a lock, and the
others wait for it.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib
import os
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "mtrain_kernels."
"""Begins the names of kernels that a record may name."""
LOCKS = "mtrain-locks"
"""The folder of locks in Triton's cache: a file for each binary, which stays empty."""
PATIENCE_S = 120.0
"""Seconds to wait for another process that compiles the same, before this one does so as well."""
POLL_S = 0.005
COMPILED = b"c"
FOUND = b"f"
BUSY = b"b"
FAILED = b"e"
_PLACE = struct.Struct("=I")


@dataclass(frozen=True)
class Launch:
    """The binary that a launch needs."""

    kernel: str
    """`module.function` of the kernel."""
    data: str
    """Types, constants, alignments and options, as Triton's own JSON."""
    binary: str = ""
    """The folder of the binary in Triton's cache; "" if it was not looked up."""

    def cached(self, cache: Path) -> bool:
        """Return whether Triton's cache in the folder `cache` has the binary."""
        name = self.kernel.rpartition(".")[2][:150]
        return bool(self.binary) and (cache / self.binary / f"__grp__{name}.json").exists()


class Busy(Exception):
    """Another process compiles the same binary now."""


class _Lookups:
    """The way in which this process looks binaries up, and those that it did."""

    def __init__(self, *, lists: bool = False, waits: bool = True) -> None:
        self.launches: dict[tuple[str, str], Launch] = {}
        self.lists = lists
        """Only list the needed kernels."""
        self.waits = waits
        """Wait for a process that compiles the same; else raise `Busy`."""


_now = _Lookups()


class Target:
    """A driver whose device is a GPU of one compute capability: all that compilation reads."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch = arch
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        """Return a number of the device."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return the target that kernels are compiled for."""
        return self.target


@contextmanager
def targeting(arch: int) -> Iterator[None]:
    """Compile for a GPU of compute capability `arch` (90 for 9.0), which need not exist."""
    from triton.runtime.driver import driver

    # The public property would look for a GPU if no driver is active yet.
    active = driver._active
    driver.set_active(Target(arch))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
            yield
    finally:
        driver._active = active


def recorded() -> list[Launch]:
    """Return the binaries that launches of this process have needed so far, in order."""
    return list(_now.launches.values())


@contextmanager
def listing(arch: int) -> Iterator[Callable[[], list[Launch]]]:
    """Yield a function that returns the binaries that the launches inside would need so far, on a
    GPU of compute capability `arch`; nothing is compiled or launched.
    """
    from triton.runtime.jit import JITFunction

    from mtrain_kernels.launch_triton import Recorded
    from mtrain_kernels.runtime import meta_stands_for

    global _now
    before = _now
    run = JITFunction.run

    def look_up(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        # Kernels of other libraries have no records, and nothing is to be compiled here.
        if not isinstance(self, Recorded):
            return None
        return run(self, *args, grid=grid, warmup=True, **more)

    lookups = _Lookups(lists=True)
    with targeting(arch), meta_stands_for("cuda"):
        _now = lookups
        JITFunction.run = look_up
        try:
            yield lambda: list(lookups.launches.values())
        finally:
            JITFunction.run = run
            _now = before


def looked_up(kernel: Any, compile_: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return the result of Triton's `compile_` for a kernel, and record it; see `_Lookups`.  The
    arguments are those of `JITFunction._do_compile`. Raises `Busy`, and Triton's errors.
    """
    name = f"{kernel.module}.{kernel.fn.__qualname__}"
    data = _data(kernel, name, *given)
    if _now.lists:
        _now.launches.setdefault((name, data), Launch(name, data))
        return None
    with _alone(f"{kernel.cache_key} {name} {data}"):
        found = compile_(*given, **named)
    digest = getattr(found, "hash", None)
    if data and isinstance(digest, str):
        _now.launches[name, data] = Launch(name, data, _folder(digest))
    return found


def _data(
    kernel: Any,
    name: str,
    key: Any,
    signature: Any,
    device: Any,
    constants: Any,
    options: Any,
    attributes: Any,
    *_: Any,
) -> str:
    """Return the text that `JITFunction.preload` reads; "" where Triton cannot write it."""
    from triton.runtime import jit

    facts = [name, signature, constants, attributes, options, key]
    write = jit.serialize_specialization_data
    if write.__code__.co_argcount > len(facts):  # since 3.9
        facts.append(kernel.device_caches[device][2])
    try:
        return str(write(*facts))
    except (TypeError, ValueError):  # a constant that JSON does not have
        return ""


def _folder(digest: str) -> str:
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


@contextmanager
def _alone(identity: str) -> Iterator[None]:
    """Hold the lock of a binary; without one where the file system has no locks."""
    from triton import knobs

    descriptor = None
    with suppress(OSError):
        folder = Path(knobs.cache.dir) / LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(identity.encode()).hexdigest()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if descriptor is None:
        yield
        return
    try:
        _take(descriptor)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    # The system frees a lock when its holder ends, so only a stopped process holds one for long.
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not _now.waits:
                raise Busy from None
            time.sleep(POLL_S)
        except OSError:
            return


def compile_ahead(
    launches: Sequence[Launch],
    arch: int,
    processes: int,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """Put the binaries of launches into Triton's cache, each in one of `processes` forked from this
    one, which must not have called CUDA.

    `begin` is called in each process first. A binary that another process compiles already is left
    to it, and one that does not compile is left to its launch. Returns how many were `compiled`,
    `cached`, `busy` and `failed`.
    """
    ours = [launch.kernel for launch in launches if launch.kernel.startswith(OURS)]
    for module in {kernel.rpartition(".")[0] for kernel in ours}:
        with suppress(Exception):  # its launches fail in the processes
            importlib.import_module(module)
    given, giving = os.pipe()
    results, telling = os.pipe()
    pids = []
    for _ in range(min(processes, len(launches))):
        pid = os.fork()
        if pid == 0:
            os.close(giving)
            os.close(results)
            _work(launches, arch, given, telling, begin)
        pids.append(pid)
    os.close(given)
    os.close(telling)
    # Processes take places of the list from the pipe as they get ready.
    with suppress(BrokenPipeError), os.fdopen(giving, "wb", buffering=0) as queue:
        for place in range(len(launches)):
            queue.write(_PLACE.pack(place))
    with os.fdopen(results, "rb") as pipe:
        told = Counter(pipe.read())
    for pid in pids:
        os.waitpid(pid, 0)
    counts = {"compiled": COMPILED, "cached": FOUND, "busy": BUSY}
    found = {name: told[code[0]] for name, code in counts.items()}
    return {**found, "failed": len(launches) - sum(found.values())}


def _work(
    launches: Sequence[Launch], arch: int, given: int, telling: int, begin: Callable[[], None]
) -> None:
    """Compile the kernels that the pipe `given` names, send the results, and end this process."""
    global _now
    try:
        begin()
        # The compiler prints its complaints, which the launch prints again.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        _now = _Lookups(waits=False)
        with targeting(arch):
            while word := os.read(given, _PLACE.size):
                os.write(telling, _compile(launches[_PLACE.unpack(word)[0]]))
    finally:
        os._exit(0)


def _compile(launch: Launch) -> bytes:
    from triton import knobs

    hits: list[bool] = []

    def heard(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = heard
    try:
        if not launch.kernel.startswith(OURS):
            return FAILED
        module, _, function = launch.kernel.rpartition(".")
        kernel = getattr(importlib.import_module(module), function)
        kernel.preload(launch.data)
    except Busy:
        return BUSY
    except Exception:  # a stale or damaged record; the launch itself reports what is wrong
        return FAILED
    return FOUND if all(hits) else COMPILED
