"""The interface that mtrain needs of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A moment in the work that was given to a device."""

    def record(self) -> None:
        """Set the moment behind all work that was given so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to a later moment; the device has come to both."""


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
    name in the group `mtrain.device_facts` are its `mtrain.config.machine.devices.DeviceFacts`, by
    which a configuration is validated before torch is there.
    """

    name: str
    """What a user writes: `cpu`, `cuda`."""
    torch_type: str
    """The type of its `torch.device`."""
    type_prefix: str
    """What its `Tensor.type()` strings start with: `torch.`, `torch.cuda.`, `torch.musa.`."""
    backend: str
    """Its torch.distributed backend."""
    namespace: Any
    """The module or object that megatron-core sees in place of `torch.cuda`."""
    pin_memory: bool
    """Host memory can be pinned for copies to it."""
    runs_ahead: bool = True
    """The host goes on while the device works; False: work is done when the call that gave it
    returns.
    """

    available: Callable[[], str | None]
    """None where it can be used, else the reason why not."""
    count: Callable[[], int | None]
    """How many of them this machine has; None: ranks share it, as many as there are."""
    device: Callable[[int], torch.device]
    """The torch device of a local rank."""
    set_index: Callable[[int], None]
    """Makes the local rank's device the current one of this process."""
    synchronize: Callable[[], None]
    """Waits for the work that was given to the current device."""
    memory_stats: Callable[[], dict[str, int]]
    """Bytes of this process: `allocated_bytes` now and `peak_bytes` since it started; where its
    allocator keeps memory for later, also `reserved_bytes`, the most that it held.
    """
    seed: Callable[[int], None]
    """Seeds its default generator."""
    rng_state: Callable[[], torch.Tensor]
    """State of its default generator, as bytes in host memory."""
    set_rng_state: Callable[[torch.Tensor], None]
    """Restores what `rng_state` returned."""
    pinned: Callable[[int], torch.Tensor] = _pinned
    """Allocates so many bytes (uint8) of host memory, with which copies overlap other work."""
    driver_bytes: Callable[[], int | None] = lambda: None
    """Memory of the current device that is in use, by whatever; None: nobody knows."""
    set_sync_debug: Callable[[str], None] = lambda mode: None
    """Sets what happens where the host waits for the device from here on: `default` (nothing),
    `warn` or `error`.
    """

    def event(self) -> Event:
        """Return a moment behind all work that was given to the current device so far."""
        event: Event = self.namespace.Event(enable_timing=True)
        event.record()
        return event

    @property
    def is_indexed(self) -> bool:
        """Return whether a `torch.device` of it has a number; the CPU's has none that counts."""
        return self.torch_type != "cpu"

    @property
    def adapts_megatron(self) -> bool:
        """Return whether megatron-core has to be rewritten to this device as it loads; not so for
        CUDA.
        """
        return self.torch_type != "cuda"
