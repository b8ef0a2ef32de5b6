"""The namespace that megatron-core sees as `torch.cuda` on a CPU.

Names and signatures are those of `torch.cuda` (torch 2.10 to 2.13) that megatron.core 0.16.1 uses.
Work on a CPU is synchronous, so streams and events order nothing. There is one generator, so the
device's random state is torch's own, and the host's is saved when the device is seeded.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_CPU = torch.device("cpu")
# A stack of the devices on which tensors are made; the last entry is the current one
_where = [_CPU]

# megatron-core distinguishes dtypes by these types.
FloatTensor = torch.FloatTensor
DoubleTensor = torch.DoubleTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
LongTensor = torch.LongTensor
IntTensor = torch.IntTensor
BoolTensor = torch.BoolTensor
ByteTensor = torch.ByteTensor


class OutOfMemoryError(RuntimeError):
    """Never raised: a CPU that runs out of memory ends the process."""


def is_available() -> bool:
    """Return False."""
    # megatron-core calls this before it uses a feature that only an accelerator has
    return False


def is_initialized() -> bool:
    """Return True, as there is nothing to initialize."""
    return True


def current_device() -> torch.device:
    """Return the device, where torch.cuda returns a number: megatron-core uses it as `device=`."""
    return _where[-1]


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Give tensors that are made inside for the current device a shape and no memory."""
    _where.append(torch.device("meta"))
    try:
        yield
    finally:
        _where.pop()


def device_count() -> int:
    """Return 1: all ranks share one device."""
    return 1


def set_device(device: Any) -> None:
    """Do nothing: there is one device."""


def synchronize(device: Any = None) -> None:
    """Do nothing: work is done when the call returns."""


def empty_cache() -> None:
    """Do nothing: torch keeps no cache of host memory."""


def get_device_name(device: Any = None) -> str:
    """Return the name of the device."""
    return "cpu"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return a capability below any GPU's."""
    # megatron-core offers features by generation, and a CPU has none of them
    return (0, 0)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return name, cores and memory under the names that torch uses for a GPU."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return SimpleNamespace(
        name="cpu", major=0, minor=0, multi_processor_count=os.cpu_count() or 1, total_memory=total
    )


class device(contextlib.AbstractContextManager["device"]):
    """A context in which a device is current; there is only one."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """A point in time, at which all earlier work is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Store the time."""
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: there is nothing to wait for."""

    def query(self) -> bool:
        """Return True: the work of a CPU is always done."""
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`.

        Raises:
            RuntimeError: one of them was never recorded.
        """
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("both events must be recorded before the time between them is read")
        return (end._at_s - self._at_s) * 1e3


class Stream(contextlib.AbstractContextManager["Stream"]):
    """A stream; all are equal, as a CPU works in the order of the program."""

    # The handle of torch's default stream.
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def __exit__(self, *exc: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None:
        """Return at once: there is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Return at once: there is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return a recorded event."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Return True: the work of a CPU is always done."""
        return True

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""


ExternalStream = Stream
_THE_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the one stream."""
    return _THE_STREAM


def default_stream(device: Any = None) -> Stream:
    """Return the one stream."""
    return _THE_STREAM


def set_stream(stream: Any) -> None:
    """Do nothing: there is one stream."""


def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing."""
    return contextlib.nullcontext()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of torch's default generator."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Set the state of torch's default generator."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of the one generator."""
    return [torch.get_rng_state()]


# A state begins with its seed, eight bytes. This bit in it marks a state that the device seeded.
_MARK = 1 << 63
# The state of the host's random numbers when the device was seeded; empty before
_host: list[torch.Tensor] = []


def _is_of_host() -> bool:
    return torch.initial_seed() < _MARK


def manual_seed(seed: int) -> None:
    """Seed torch's default generator for the device, as `torch.manual_seed` does.

    Seeding a GPU does not change the host's random numbers: their state is saved for `host_random`.
    """
    if _is_of_host():
        # A second seed must not overwrite the saved state of the host.
        _host[:] = [torch.get_rng_state()]
    state = torch.default_generator.manual_seed(seed).get_state()
    # `-_MARK` sets the same bit: 1 << 63 itself does not fit into an int64.
    state[:8].view(torch.int64)[0] |= -_MARK
    torch.default_generator.set_state(state)


manual_seed_all = manual_seed


def initial_seed() -> int:
    """Return the seed of the device."""
    return torch.initial_seed() & (_MARK - 1)


@contextlib.contextmanager
def host_random() -> Iterator[None]:
    """Draw the host's random numbers inside, whatever seed the device has; the device's continue
    afterwards.

    megatron-core draws weights this way with use_cpu_initialization: they are the same on ranks
    whose devices have different seeds.
    """
    if _is_of_host() or not _host:
        yield
        return
    # Host and device share the generator, so the device's state is saved meanwhile.
    devices = torch.get_rng_state()
    torch.set_rng_state(_host[0])
    try:
        yield
    finally:
        _host[:] = [torch.get_rng_state()]
        torch.set_rng_state(devices)


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))


# torch.cuda has a generator for each device; here every index gives torch's own.
default_generators = _Generators()
random = SimpleNamespace(
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    manual_seed=manual_seed,
    manual_seed_all=manual_seed_all,
    initial_seed=initial_seed,
)


def _lazy_init() -> None:
    return None


def _lazy_call(callable_: Callable[[], Any], **kwargs: Any) -> None:
    # torch.cuda would wait until CUDA is initialized; a CPU always is.
    callable_()


def memory_allocated(device: Any = None) -> int:
    """Return zero: `mtrain.devices.cpu` measures the whole process instead."""
    return 0


max_memory_allocated = memory_allocated
memory_reserved = memory_allocated
max_memory_reserved = memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return zero under every name."""
    return collections.defaultdict(int)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Do nothing: nothing is counted."""


class CUDAPluggableAllocator:
    """A name that megatron-core imports; host memory has no other allocator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a CPU has no pluggable allocator")


memory = SimpleNamespace(
    CUDAPluggableAllocator=CUDAPluggableAllocator,
    memory_allocated=memory_allocated,
    max_memory_allocated=max_memory_allocated,
    memory_stats=memory_stats,
    empty_cache=empty_cache,
)
nvtx = SimpleNamespace(
    range_push=lambda message: 0,
    range_pop=lambda: 0,
    mark=lambda message: None,
    range=lambda message, *args, **kwargs: contextlib.nullcontext(),
)
amp = SimpleNamespace(
    custom_fwd=lambda fwd=None, **kwargs: fwd, custom_bwd=lambda bwd=None, **kwargs: bwd
)


class CUDAGraph:
    """A name whose features megatron-core looks up; mtrain refuses CUDA graphs without CUDA."""
