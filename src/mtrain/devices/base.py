"""The interface that mtrain needs of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in the work of a device."""

    def record(self) -> None:
        """Set the point after all work that was issued so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the point."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds to a later point; the device has reached both."""


def _pinned(size: int) -> torch.Tensor:
    import torch

    # torch is imported on the first call: modules that only read facts of a device stay light.
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


# Devices are compared by identity: their functions cannot be compared.
@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """A kind of device: facts and functions.

    A third party publishes one under the entry point group `mtrain.devices`; neither mtrain nor
    megatron-core is edited for it. See `mtrain.devices.cpu` for a complete example. Under the same
    name in the group `mtrain.device_facts` are its `mtrain.config.machine.devices.DeviceFacts`,
    which validate a configuration before torch is imported.
    """

    name: str
    """The name in a configuration: `cpu`, `cuda`."""
    torch_type: str
    """The type of its `torch.device`."""
    type_prefix: str
    """The beginning of its `Tensor.type()` strings: `torch.`, `torch.cuda.`, `torch.musa.`."""
    backend: str
    """Its torch.distributed backend."""
    namespace: Any
    """The module or object that megatron-core sees in place of `torch.cuda`."""
    pin_memory: bool
    """True if host memory can be pinned for copies to the device."""
    runs_ahead: bool = True
    """True if the host continues while the device works; False if calls return after the work."""

    available: Callable[[], str | None]
    """Returns None if the device can be used, else the reason."""
    count: Callable[[], int | None]
    """Returns the number of devices of this machine; None if any number of ranks share one."""
    device: Callable[[int], torch.device]
    """Returns the torch device of a local rank."""
    set_index: Callable[[int], None]
    """Makes the local rank's device the current one of this process."""
    synchronize: Callable[[], None]
    """Waits for all work that was issued to the current device."""
    memory_stats: Callable[[], dict[str, int]]
    """Returns bytes of this process: `allocated_bytes` now and `peak_bytes` since it started; if
    its allocator keeps memory for later, also that, `held_bytes`, and its peak, `reserved_bytes`.
    """
    seed: Callable[[int], None]
    """Seeds its default generator."""
    rng_state: Callable[[], torch.Tensor]
    """Returns the state of its default generator, as bytes in host memory."""
    set_rng_state: Callable[[torch.Tensor], None]
    """Restores the result of `rng_state`."""
    pinned: Callable[[int], torch.Tensor] = _pinned
    """Allocates so many bytes (uint8) of host memory, with which copies overlap other work."""
    pin: Callable[[torch.Tensor], Callable[[], None]] = lambda memory: lambda: None
    """Pins host memory that something else allocated, if it can, so that copies overlap other work;
    returns a function that undoes it.
    """
    driver_bytes: Callable[[], int | None] = lambda: None
    """Returns the bytes in use on the current device, by all processes; None if unknown."""
    dump_memory: Callable[[str], None] | None = None
    """Writes the allocator's blocks to a file in its viewer's format; None: there is none."""
    captured: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    """Records the work that a function issues to the device, which must not wait for it and must
    have done the same before; returns a function that issues all of it at once. None: unknown here.
    """
    set_sync_debug: Callable[[str], None] = lambda mode: None
    """Sets the reaction to each wait of the host for the device: `default`, `warn` or `error`."""

    def event(self) -> Event:
        """Return a point after all work that was issued to the current device so far."""
        event: Event = self.namespace.Event(enable_timing=True)
        event.record()
        return event

    @property
    def is_indexed(self) -> bool:
        """Return whether the number of its `torch.device` distinguishes devices."""
        # torch accepts cpu:0 and cpu:1, and both are the same memory
        return self.torch_type != "cpu"

    @property
    def adapts_megatron(self) -> bool:
        """Return whether megatron-core, which is written for CUDA, is rewritten as it loads."""
        return self.torch_type != "cuda"
