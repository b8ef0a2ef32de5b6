"""Parts of a GPU for copies of activations to host memory, where the CPU is the device: a flag of
TransformerEngine, and streams that hold memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def let_offload() -> None:
    """Let this process, which is forked for it, copy activations to the host.

    Host memory that is given back is filled with NaN, as the next copy might overwrite it.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    # All work is done when a call returns, so no stream holds memory.
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    free = offload.GPUTensorPool.free

    def poisoned(self: Any, tensor: torch.Tensor, **kwargs: Any) -> None:
        tensor.fill_(float("nan"))
        free(self, tensor, **kwargs)

    offload.GPUTensorPool.free = poisoned
    offload.print_offload_summary_table = lambda total: None


def watched_copies() -> list[tuple[StorageWeakRef, int]]:
    """Return a list that gets, of each tensor that is copied to the host from now on, a reference
    to its memory and its bytes.
    """
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    seen: list[tuple[StorageWeakRef, int]] = []
    original = offload.ChunkOffloadHandler.offload

    def watched(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        storage = tensor.untyped_storage()
        seen.append((StorageWeakRef(storage), storage.nbytes()))
        return original(self, tensor, **kwargs)

    offload.ChunkOffloadHandler.offload = watched
    return seen


def still_held(seen: list[tuple[StorageWeakRef, int]]) -> int:
    """Return the bytes of watched tensors that still have memory."""
    held = 0
    for ref, size in seen:
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        # One that is freed by force is alive and has no bytes.
        held += size if storage is not None and storage.nbytes() else 0
    return held
