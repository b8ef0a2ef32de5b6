"""The weights of a run in progress by Hugging Face's names, tensor by tensor, from any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, model_boxes
from mtrain.convert.huggingface.model import tables
from mtrain.convert.match import export_match
from mtrain.mcore.state.sharding import TensorShard, gathered, model_shards
from mtrain.world.heartbeat import waiting
from mtrain.world.init import World

PREFIX = "model/"


@torch.no_grad()
def hf_weights(
    run: RunConfig, world: World, chunks: list[Any], kind: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a folder of `model_type` `kind` by its name, whole on every rank, which
    make them together; only a few of them exist at once.

    Raises:
        CorruptData: the table of this `model_type` does not fit the model.
        NotImplementedError: adapters are not merged into their weights here.
    """
    if run.peft.kind is not None:
        raise NotImplementedError("weights with adapters are not pushed")
    boxes = model_boxes(run)
    found = export_match(tables(kind, run.model)[0], run.model, boxes)
    copies: dict[str, list[str]] = {}
    for name, of in found.copies.items():
        copies.setdefault(of, []).append(name)
    with gathered(chunks):
        held: dict[str, list[TensorShard]] = {}
        for shard in model_shards(chunks):
            if shard.primary:
                held.setdefault(shard.key.removeprefix(PREFIX), []).append(shard)
        for step in found.steps:
            given = [
                _whole(boxes[name], held.get(boxes[name].key, []), world) for name in step.ours
            ]
            made = step.operation.apply(given, run.model, inward=False)
            for name, tensor in zip(step.theirs, made, strict=True):
                for each in (name, *copies.get(name, ())):
                    yield each, tensor.contiguous()


def _whole(box: Box, shards: list[TensorShard], world: World) -> torch.Tensor:
    """Return a tensor of ours on every rank, of pieces that each stand on one of them."""
    dtypes = sorted({str(shard.tensor.dtype) for shard in shards})
    out = torch.zeros(box.size, dtype=_agreed(dtypes, world), device=world.torch_device)
    for shard in shards:
        piece = shard.tensor
        if shard.flat is not None:
            count = torch.Size(shard.shape).numel()
            flat = torch.zeros(count, dtype=piece.dtype, device=piece.device)
            flat[slice(*shard.flat)] = piece
            piece = flat
        piece = piece.reshape(shard.shape)
        # The part of the piece in the box, in coordinates of either.
        low = [max(a, b) for a, b in zip(box.offset, shard.offset, strict=True)]
        ends = zip(box.offset, box.size, shard.offset, shard.shape, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        to, source = (
            tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
            for offset in (box.offset, shard.offset)
        )
        # Added, because flat pieces of one tensor complete each other.
        out[to] += piece[source].to(out.device)
    with waiting():
        # A sum of one number and zeros is that number, in any format.
        dist.all_reduce(out)
    return out.view(box.shape)


def _agreed(dtypes: list[str], world: World) -> torch.dtype:
    """Return the format of a tensor, which only ranks with a piece of it know."""
    name = world.first_problem(dtypes[0] if dtypes else "")
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found
