"""What autograd keeps between a forward and its backward: a job for `run_ranks` that
measures it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from mtrain.config.schema.run import RunConfig


class Kept:
    """Counts the storages that saved tensors hold, each once, without those that were there before.

    What FSDP gathers gives weights memory of their own for a while, and is a part of its own in the
    plan: `gathered` says which these are at this moment.
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
        """Called by autograd for a tensor that it saves."""
        saved = _Saved(self, tensor)
        self.most = max(self.most, self.now())
        return saved

    def now(self) -> int:
        """Return bytes at this moment; a storage that was emptied since counts as what
        it is now.
        """
        return sum(found[1].nbytes() for found in self.live.values())

    def table(self) -> list[tuple[int, str, str, str]]:
        """Of each storage: bytes, shape and dtype of a tensor in it, and the line that saved it."""
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
    frames = [f for f in traceback.extract_stack() if "kept.py" not in f.filename]
    own = [
        f
        for f in frames
        if "/torch/nn/modules" not in f.filename and "torch/autograd" not in f.filename
    ]
    return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(own[-5:]))


def _held(parts: Any) -> set[int]:
    """Where the memory of parameters, buffers and gradients begins."""
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
    """Where the memory of the weights that modules have begins, at the moment of a call."""
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
    """Return a job of one rank: one step's forward and backward, and the most that was kept after
    any forward.
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
        real_add = linear._add_in_place
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

        def add_in_place(
            weight: Any, dy: Any, x: Any
        ) -> Any:  # what comes back from a hook has lost its attributes
            return real_add(weights[weight.data_ptr()], dy, x)

        steps.forward_step = forward_step
        linear._add_in_place = add_in_place
        try:
            read = parts.train_data.microbatches(0, run.trainer.batch)
            batches = [to_device(cast(steps.Batch, b), world) for b in read]
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved.tensor):
                steps.gradients(parts, batches)
        finally:
            steps.forward_step = real
            linear._add_in_place = real_add
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
    """Return a job of one rank: bytes of weights, gradients and optimizer state after a step, each
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
    """Main weights and moments with their scales; not the number of a step."""
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
