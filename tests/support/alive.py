"""Every storage that is alive during a real step: a job for `run_ranks` that counts the
most bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mtrain.config.schema.run import RunConfig

COLLECTIVE = (
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_reduce",
)


class Alive(TorchDispatchMode):
    """Counts storages from their first operation on; not what a collective needs inside
    of itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, Any]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for found in tree_leaves((args, kwargs, out)):
            if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor | DTensor):
                self._see(found.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        size = storage.nbytes()
        before, seen = self.live.get(key) or (0, weakref.ref(storage, partial(self._gone, key)))
        self.live[key] = size, seen
        self.now += size - before
        self.most = max(self.most, self.now)

    def _gone(self, key: int, _: Any) -> None:
        self.now -= self.live.pop(key)[0]

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Resizes are seen, and collectives are not looked into."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

        real = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = real(storage, size)
            if storage._cdata in self.live:
                self._see(storage)
            return out

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
            for name in (name for name in COLLECTIVE if hasattr(dist, name)):
                stack.enter_context(mock.patch.object(dist, name, _unseen(getattr(dist, name))))
            real_together = param_and_grad_buffer._coalescing_manager

            @contextmanager
            def together(*args: Any, **more: Any) -> Iterator[Any]:
                manager = real_together(*args, **more)
                yield manager.__enter__()
                with _disable_current_modes():
                    manager.__exit__(None, None, None)

            stack.enter_context(
                mock.patch.object(param_and_grad_buffer, "_coalescing_manager", together)
            )
            yield


def _unseen(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **kwargs)

    return inner


def alive(run: RunConfig) -> int:
    """Return a job of one rank: the most bytes that were alive at once in the second step."""
    from mtrain.mcore.adapter.fake_patches import fake_patches
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop import step as steps
    from mtrain.train.loop.prefetch import to_device
    from mtrain.world.init import joined

    seen = Alive()
    with fake_patches(), joined(run) as world, seen.complete():
        with seen:
            parts = assemble(run, world, splits_of(run))
        for _ in range(2):
            seen.most = 0
            read = parts.train_data.microbatches(0, run.trainer.batch)
            batches = [to_device(cast(steps.Batch, one), world) for one in read]
            with seen:
                steps.gradients(parts, batches)
                steps.update(parts.state, run.optim.schedule_counts)
    return seen.most
