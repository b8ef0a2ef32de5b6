"""A stand-in for a GPU's driver, for processes that have this folder first in PYTHONPATH.

`torch.cuda` counts its calls in the file `DRIVER_LOG`, a line `PID FUNCTION` each, and like the
real runtime refuses to work in a process that was forked from one that had used it. The device
`cuda` computes on the CPU behind it, and this machine says that it has `DRIVER_GPUS` of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

CALLS = (
    "is_available",
    "device_count",
    "init",
    "is_initialized",
    "set_device",
    "current_device",
    "synchronize",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "mem_get_info",
    "memory_stats",
    "get_device_name",
    "get_device_capability",
    "get_device_properties",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
    "set_sync_debug_mode",
)
used_by: int | None = None
"""The process that used the driver first, as each process that is forked from it remembers it."""


def note(name: str) -> None:
    """Count one call of the driver.

    Raises:
        RuntimeError: the process was forked from one that had used it.
    """
    global used_by
    with open(os.environ["DRIVER_LOG"], "a") as log:
        log.write(f"{os.getpid()} {name}\n")
    if used_by not in (None, os.getpid()):
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you"
            " must use the 'spawn' start method"
        )
    used_by = os.getpid()


def gpus() -> int:
    """Return the number of devices of this machine."""
    return int(os.environ["DRIVER_GPUS"])


def patch_torch(torch: Any) -> None:
    """Put the counting functions in front of `torch.cuda`."""
    values: dict[str, Callable[..., Any]] = {
        "is_available": lambda *_: True,
        "device_count": lambda *_: gpus(),
        "current_device": lambda *_: 0,
        "mem_get_info": lambda *_: (1 << 36, 1 << 37),
        "get_device_name": lambda *_: "Stand-in",
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed, *_: torch.random.default_generator.manual_seed(seed),
        "memory_stats": lambda *_: {},
    }
    for name in CALLS:

        def call(*args: Any, name: str = name) -> Any:
            note(name)
            return values.get(name, lambda *_: 0)(*args)

        setattr(torch.cuda, name, call)
    torch.backends.cuda.is_built = lambda: True


def patch_device(module: Any) -> None:
    """Let the device compute on the CPU, and its functions ask the driver."""
    import torch

    from mtrain.devices import cpu_namespace

    def count() -> int:
        number: int = torch.cuda.device_count()
        return number

    def memory() -> dict[str, int]:
        torch.cuda.memory_allocated()
        return on_cpu.memory_stats()

    from mtrain.devices.cpu import CPU as on_cpu

    more: dict[str, Any] = {"fork_safe": False} if hasattr(on_cpu, "fork_safe") else {}
    module.CUDA = replace(
        on_cpu,
        name="cuda",
        namespace=cpu_namespace,
        available=lambda: None if torch.cuda.is_available() else "no driver",
        count=count,
        set_index=torch.cuda.set_device,
        synchronize=torch.cuda.synchronize,
        memory_stats=memory,
        **more,
    )


def patch_machine(module: Any) -> None:
    """Give this machine the configured number of devices, and no compiler of kernels for them."""
    real = module.Machine.here.__func__

    def here(cls: Any, *args: Any) -> Any:
        return replace(
            real(cls, *args), gpus=gpus(), unusable_gpus=0, triton=False, transformer_engine=False
        )

    module.Machine.here = classmethod(here)


PATCHES: dict[str, Callable[[Any], None]] = {
    "torch": patch_torch,
    "mtrain.devices.cuda": patch_device,
    "mtrain.config.resolve.resolution": patch_machine,
}


class Patching(importlib.abc.Loader):
    """Loads a module as it would be, and patches it then."""

    def __init__(self, real: importlib.abc.Loader, patch: Callable[[Any], None]) -> None:
        self.real = real
        self.patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        self.patch(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are patched."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = Patching(spec.loader, PATCHES[name])
        return spec


if "DRIVER_LOG" in os.environ:
    sys.meta_path.insert(0, Finder())
