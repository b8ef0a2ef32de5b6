"""The device facts that a configuration needs before torch is imported, by device name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mtrain.config.machine import installed

# Entry points of device plug-ins (`mtrain.devices.base.Device`).
GROUP = "mtrain.devices"
# Entry points of their facts, under the same names: a `DeviceFacts` in a module that imports no
# torch.
FACTS_GROUP = "mtrain.device_facts"
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The facts of a device. The defaults assume nothing about a plug-in's device."""

    name: str
    on_host: bool = False
    """Ranks are processes on their machine's cores, as many as a layout needs."""
    counted: bool = False
    """`Machine.gpus` counts those of this machine, and `auto` takes them where there are enough."""
    cuda_kernels: bool = False
    """CUDA kernels run on it: TransformerEngine, DeepEP, HybridEP. `cluster.sm` describes it."""
    triton: bool = False
    """Triton compiles for it."""
    torch_kernels: bool = False
    """torch's own fused kernels are the better choice on it."""
    fused_adam: bool = False
    """torch's Adam updates a weight of it in one pass."""
    fork_safe: bool = False
    """Ranks may be forked from a process with torch; else each has its own interpreter."""


CPU = DeviceFacts(name="cpu", on_host=True, fused_adam=True, fork_safe=True)
CUDA = DeviceFacts(
    name="cuda", counted=True, cuda_kernels=True, triton=True, torch_kernels=True, fused_adam=True
)
SHIPPED = {facts.name: facts for facts in (CPU, CUDA)}


def facts_of(name: str) -> DeviceFacts:
    """Return the facts of a device; those of a plug-in from its entry point, where it has one.

    Raises:
        BadEnvironment: the entry point does not load, or is something else.
    """
    return SHIPPED.get(name) or _of_plug_in(name)


@cache
def _of_plug_in(name: str) -> DeviceFacts:
    entry = installed.found(FACTS_GROUP).get(name)
    if entry is None:
        return DeviceFacts(name=name)
    return installed.load(entry, f"facts of device {name!r}", DeviceFacts)


def names() -> list[str]:
    """Return the names of all devices: the shipped ones, then those of plug-ins."""
    return [*SHIPPED, *sorted(installed.found(GROUP).keys() - SHIPPED.keys())]


def with_cuda_kernels() -> str:
    """Return the names of the devices that run CUDA kernels, as words."""
    return " and ".join(name for name, facts in SHIPPED.items() if facts.cuda_kernels)
