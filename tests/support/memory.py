"""Bytes of a real step: what autograd saves, and every storage that is alive."""

from __future__ import annotations

import traceback
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


class Kept:
    """Counter of the storages that saved tensors hold, each once, without those that existed
    before.

    FSDP gives gathered weights temporary memory, which the plan counts separately: `gathered`
    returns these storages.
    """

    def __init__(
        self, known: set[int], gathered: Callable[[], set[int]] = set, *, lines: bool = False
    ) -> None:
        self.known = known
        self.gathered = gathered
        self.lines = lines
        self.live: dict[int, list[Any]] = {}
        self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Record a tensor that autograd saves."""
        saved = _Saved(self, tensor)
        self.most = max(self.most, self.now())
        return saved

    def now(self) -> int:
        """Return the bytes at this moment; a storage that was emptied counts with its
        present size.
        """
        return sum(found[1].nbytes() for found in self.live.values())

    def table(self) -> list[tuple[int, str, str, str]]:
        """Return for each storage: bytes, shape and dtype of a tensor in it, and the line that
        saved it.
        """
        return [(s.nbytes(), *words) for _, s, words in self.live.values()]


class _Saved:
    """A saved tensor for as long as autograd holds it."""

    def __init__(self, kept: Kept, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor.detach()
        self.kept = kept
        self.key = storage._cdata
        known = not storage.nbytes() or storage.data_ptr() in kept.known
        if known or (self.key not in kept.live and storage.data_ptr() in kept.gathered()):
            self.key = 0
            return
        words = str(tuple(tensor.shape)), str(tensor.dtype), _line() if kept.lines else ""
        kept.live.setdefault(self.key, [0, storage, words])[0] += 1

    def __del__(self) -> None:
        entry = self.kept.live.get(self.key)
        if entry is not None:
            entry[0] -= 1
            if not entry[0]:
                del self.kept.live[self.key]


def _line() -> str:
    frames = [f for f in traceback.extract_stack() if "memory.py" not in f.filename]
    own = [
        f
        for f in frames
        if "/torch/nn/modules" not in f.filename and "torch/autograd" not in f.filename
    ]
    return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(own[-5:]))


def _held(parts: Any) -> set[int]:
    """Return the addresses of the storages of parameters, buffers and gradients."""
    found: set[int] = set()
    for chunk in parts.state.chunks:
        for held in (*chunk.parameters(), *torch.nn.Module.buffers(chunk)):
            held = getattr(held, "_local_tensor", held)  # of what FSDP2 shards
            found.add(held.untyped_storage().data_ptr())
            for name in ("main_grad", "grad"):
                gradient = getattr(held, name, None)
                if isinstance(gradient, torch.Tensor):
                    found.add(gradient.untyped_storage().data_ptr())
    return found - {0}


def _gathered(parts: Any) -> Callable[[], set[int]]:
    """Return a function that gives the addresses of the modules' present weights."""
    modules = [
        module for chunk in parts.state.chunks for module in chunk.modules() if module._parameters
    ]

    def found() -> set[int]:
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        return {p.untyped_storage().data_ptr() for p in own if not hasattr(p, "_local_tensor")} - {
            0
        }

    return found


def measured(run: RunConfig, *, lines: bool = False) -> dict[str, Any]:
    """Run one step of a rank, forward and backward; return the most that was saved after any
    forward.
    """
    from mtrain.mcore.layers import linear
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop import step as steps
    from mtrain.train.loop.prefetch import to_device
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        gathered = _gathered(parts) if run.parallel.fsdp != "none" else set
        kept = Kept(_held(parts), gathered, lines=lines)
        after: list[int] = []
        best: list[Any] = []
        real = steps.forward_step
        real_parameter = linear.parameter_of
        plain = (
            p for c in parts.state.chunks for p in c.parameters() if not hasattr(p, "_local_tensor")
        )
        weights = {p.data_ptr(): p for p in plain}

        def forward_step(objective: Any, iterator: Any, model: Any) -> Any:
            output, loss = real(objective, iterator, model)
            after.append(kept.now())
            if lines and after[-1] == max(after):
                best[:] = kept.table()
            return output, loss

        def parameter_of(weight: Any) -> Any:
            # A hook returns weights without their attributes.
            return weights[weight.data_ptr()]

        steps.forward_step = forward_step
        linear.parameter_of = parameter_of
        try:
            read = parts.train_data.microbatches(0, run.trainer.batch)
            batches = [to_device(cast(steps.Batch, b), world) for b in read]
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved.tensor):
                steps.gradients(parts, batches)
        finally:
            steps.forward_step = real
            linear.parameter_of = real_parameter
        sizes = {
            "weights": sum(
                p.numel() * p.element_size() for c in parts.state.chunks for p in c.parameters()
            ),
            "numbers": sum(p.numel() for c in parts.state.chunks for p in c.parameters()),
        }
        return {
            "after": after,
            "kept": max(after),
            "most": kept.most,
            "rank": world.rank,
            **sizes,
            "table": best,
        }


def held(run: RunConfig) -> dict[str, Any]:
    """Run a step on one rank; return the bytes of weights, gradients and optimizer state, each
    storage once.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        train_step(parts, stop_requested=False)
        weights = [p for chunk in parts.state.chunks for p in chunk.parameters()]
        gradients = [p.main_grad for p in weights if getattr(p, "main_grad", None) is not None]
        own = _bytes(weights, set())
        return {
            "numbers": sum(p.numel() for p in weights),
            "weights": own,
            "gradients": _bytes(gradients, set()),
            "optimizer": _bytes(
                _states(parts.state.optimizer), {p.untyped_storage().data_ptr() for p in weights}
            ),
            "data_rank": world.coords["cp"] + world.grid.cp * world.coords["dp"],
        }


def _bytes(tensors: list[torch.Tensor], known: set[int]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in found.items() if place not in known)


def _states(optimizer: Any) -> list[torch.Tensor]:
    """Return main weights and moments with their scales, without step numbers."""
    found: list[torch.Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            found += [p for p in group["params"] if p.numel()]
        for state in part.optimizer.state.values():
            found += [
                t
                for name, t in state.items()
                if isinstance(t, torch.Tensor) and name != "step" and t.numel()
            ]
        for scales in getattr(part.optimizer, "_scales", {}).values():
            found += scales.values()
        for factors in getattr(part.optimizer, "factors", {}).values():  # of soap
            found += [t for t in tree_leaves(factors) if isinstance(t, torch.Tensor)]
    return found


COLLECTIVE = (
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "all_reduce",
)


class Alive(TorchDispatchMode):
    """Counter of storages from their first operation on, without the internal ones of
    collectives.
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
        """Count resizes, and do not look into collectives."""
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
    """Run two steps on one rank; return the most bytes alive at once in the second."""
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
