"""The binaries that the first step of a run needs, found on tensors without memory.

Model, optimizer and pipeline schedule are those of the run, built in a fake world and stepped on
`torch.device("meta")`, where Triton's kernels are looked up for a GPU and neither compiled nor
launched. So shapes, types, constants and alignments are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from mtrain_kernels.compilations import Launch, listing
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mtrain.config.schema.run import RunConfig
from mtrain.devices import cpu_namespace
from mtrain.mcore.adapter.ahead import stay_on_device
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop import step as steps
from mtrain.train.loop.prefetch import Batch, to_device
from mtrain.train.trace.recorder import OWN, collective, single_rank
from mtrain.train.trace.stand_ins import stand_in
from mtrain.world import fake_world

META = torch.device("meta")
_SCALED = {
    getattr(torch.ops.aten, name)
    for name in ("_scaled_mm", "_scaled_mm_v2")
    if hasattr(torch.ops.aten, name)
}
"""Products in FP8, whose shape functions refuse layouts of scales that cuBLAS takes."""
MICROBATCHES = 2
"""The first of a step quantises weights and fills buffers, and those after it are alike."""


def launches_of(run: RunConfig, ranks: list[int], arch: int) -> tuple[list[Launch], str]:
    """Return the binaries that ranks of a resolved run need on GPUs of compute capability `arch`
    (90 for 9.0), in order of their launches, and why some may be missing.

    What the run asks of data has to be prepared. A step that cannot be made here ends early.
    """
    why = ""
    with listing(arch) as needed:
        for rank in ranks:
            try:
                _step(run, rank)
            except Exception as error:  # whatever it is, those found so far are right
                first = (str(error).strip().splitlines() or [""])[0]
                why = f"{type(error).__name__}: {first}"
        return needed(), why


def _step(run: RunConfig, rank: int) -> None:
    with ExitStack() as stack:
        # Generators of a CPU cannot be registered with a graph.
        stack.enter_context(mock.patch.object(fake_world, "tracker_of", return_value={}))
        world = stack.enter_context(fake_world.silent_world(run, rank, META))
        splits = splits_of(run)
        stack.enter_context(cpu_namespace.shapes_only())
        stack.enter_context(single_rank())
        stack.enter_context(_types_of_memory())
        stack.enter_context(_Shapes())
        with META:
            context = assemble(run, world, splits, drawn=False)
        # As in a run on a GPU, where the host does not wait for these numbers.
        stay_on_device(context.state.chunks[0].config)
        number = min(MICROBATCHES * max(1, run.parallel.pp), run.trainer.batch)
        read = context.train_data.microbatches(0, run.trainer.batch)
        batches = [to_device(cast(Batch, batch), world) for batch in read][:number]
        steps.gradients(context, batches)
        steps.update(context.state, run.optim.schedule_counts)


@contextmanager
def _types_of_memory() -> Iterator[None]:
    """Let `Tensor.type` name types without `meta`, which megatron-core compares."""
    real = torch.Tensor.type

    def type_(tensor: torch.Tensor, *given: Any, **more: Any) -> Any:
        found = real(tensor, *given, **more)
        return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found

    with mock.patch.object(torch.Tensor, "type", type_):
        yield


class _Shapes(TorchDispatchMode):
    """Operations on tensors without memory, of which those of the host become part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return collective(func, args)
        own = OPDEFS.get(func._schema.name) if func.namespace == OWN else None
        if own is not None:
            with self:
                return own._init_fn(*args, **kwargs)
        if func.overloadpacket in _SCALED:
            given = [*args, *kwargs.values()]
            dtype = next((one for one in given if isinstance(one, torch.dtype)), args[0].dtype)
            return args[0].new_empty((args[0].shape[0], args[1].shape[1]), dtype=dtype)
        _, out = stand_in(func, args, kwargs)
        if out is not NotImplemented:
            return out
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # A number that the host made meets tensors of the device, as a device would take it.
            moved = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
            return func(*moved[0], **moved[1])


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=META)
