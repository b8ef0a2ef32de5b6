"""NVIDIA's GPUs and AMD's, which torch presents alike; the only file with `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from mtrain.devices.base import Device


def _available() -> str | None:
    # is_available() is False for this too, but the fix is another installation of torch
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA GPU and driver here"
    return None


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank)


def _memory_stats() -> dict[str, int]:
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "held_bytes": torch.cuda.memory_reserved(),
        # The peak of reserved memory: a job runs out of that, and not of allocated memory.
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _driver_bytes() -> int:
    # Unlike the allocator's figures, this includes NCCL, CUDA graphs and other processes.
    free, total = torch.cuda.mem_get_info()
    return total - free


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    # Only calls of this thread may disturb the capture: a watchdog may ask the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def _pin(memory: torch.Tensor) -> Callable[[], None]:
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    # Copies from memory that cannot be pinned work as well: they only take longer.
    if int(runtime.cudaHostRegister(address, memory.numel(), 0)) != 0:
        # The runtime keeps the error for the next launch, whoever makes it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return lambda: None

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


CUDA = Device(
    name="cuda",
    torch_type="cuda",
    type_prefix="torch.cuda.",
    backend="nccl",
    namespace=torch.cuda,
    pin_memory=True,
    available=_available,
    count=torch.cuda.device_count,
    device=_device,
    set_index=torch.cuda.set_device,
    synchronize=torch.cuda.synchronize,
    memory_stats=_memory_stats,
    seed=torch.cuda.manual_seed,
    rng_state=torch.cuda.get_rng_state,
    set_rng_state=torch.cuda.set_rng_state,
    pin=_pin,
    driver_bytes=_driver_bytes,
    dump_memory=torch.cuda.memory._dump_snapshot,
    captured=_captured,
    set_sync_debug=torch.cuda.set_sync_debug_mode,
)
