"""What mtrain asks of a device, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """A kind of device: facts and functions.

    A third party publishes one under the entry point group `mtrain.devices`; neither mtrain nor megatron-core
    is edited for it. See `mtrain.devices.cpu` for a complete example. Under the same name in the group
    `mtrain.device_facts` are its `mtrain.config.devices.DeviceFacts`, by which a configuration is validated before
    torch is there.
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
    fork_safe: bool
    """Ranks may be forked from a parent that has imported torch."""
    pin_memory: bool
    """Host memory can be pinned for copies to it."""

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
    """`allocated_bytes` now and `peak_bytes` since the process started, of this process."""
    seed: Callable[[int], None]
    """Seeds its default generator."""
    rng_state: Callable[[], torch.Tensor]
    """State of its default generator, as bytes in host memory."""
    set_rng_state: Callable[[torch.Tensor], None]
    """Restores what `rng_state` returned."""

    @property
    def is_indexed(self) -> bool:
        """Whether a `torch.device` of it has a number; the CPU's has none that counts."""
        return self.torch_type != "cpu"

    @property
    def adapts_megatron(self) -> bool:
        """Whether megatron-core has to be rewritten to this device as it loads; not so for CUDA."""
        return self.torch_type != "cuda"
