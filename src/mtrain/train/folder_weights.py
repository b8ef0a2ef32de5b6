"""The weights of a Hugging Face folder as those of a built model: each rank reads what it holds."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain.ckpt.folder import MODEL
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, boxes_from_family
from mtrain.convert.huggingface.model import HEAD, SCORE, open_matching, tables
from mtrain.convert.huggingface.reader import Reader
from mtrain.convert.match import check_shape, match
from mtrain.convert.raw_arrays import as_tensor
from mtrain.errors import CorruptData
from mtrain.mcore.state.sharding import TensorShard, model_shards, refresh
from mtrain.world.heartbeat import tick


@torch.no_grad()
def load_folder(run: RunConfig, source: Path, chunks: list[Any]) -> None:
    """Read this rank's weights of a model; memory holds the tensors of one step at a time.

    Raises:
        ConfigError: the folder has another model, key by key.
        CorruptData: its tensors are not those of the model, or cannot be read.
    """
    kind, folder = open_matching(run, source)
    reader = Reader(folder)
    boxes = boxes_from_family(run)
    shards = defaultdict[str, list[TensorShard]](list)
    for shard in model_shards(chunks):
        shards[shard.key].append(shard)
    # A folder of a model that writes text has no value head: the drawn one stays.
    if run.model.head and SCORE not in reader.names:
        del boxes[HEAD]
        shards.pop(MODEL + HEAD, None)
    left = {key: sum(prod(shard.shape) for shard in held) for key, held in shards.items()}
    for step in match(tables(kind, run.model), run.model, boxes, reader.names).steps:
        tick()
        met = {
            name: [s for s in shards[MODEL + boxes[name].key] if overlap(boxes[name], s)]
            for name in step.ours
        }
        # Other ranks hold what this step makes.
        if not any(met.values()):
            continue
        dtype = reader.dtype(step.theirs[0])
        given = [reader.tensor(name) for name in step.theirs]
        made = step.operation.apply(given, run.model, inward=True)
        # A step may make several tensors, as of queries, keys and values in one.
        for name, words in zip(step.ours, made, strict=True):
            box = boxes[name]
            check_shape(step, name, words.shape, box)
            whole = as_tensor(np.ascontiguousarray(words), dtype).view(box.size)
            for shard in met[name]:
                left[shard.key] -= _fill(shard, box, whole)
    # A tensor that nothing fills would keep random memory.
    short = [key for key, number in left.items() if number]
    if short:
        raise CorruptData(f"{source} does not have all of {', '.join(sorted(short)[:3])}")
    refresh(chunks)


def overlap(box: Box, shard: TensorShard) -> tuple[slice, ...]:
    """Return the common part of a whole tensor of ours and a shard, by the places of the whole
    tensor of a checkpoint; empty if there is none.
    """
    both = [
        slice(max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(box.offset, box.size, shard.offset, shard.shape, strict=True)
    ]
    return tuple(both) if all(part.start < part.stop for part in both) else ()


def _fill(shard: TensorShard, box: Box, whole: torch.Tensor) -> int:
    """Copy the common part to a shard; return its elements."""
    both = overlap(box, shard)
    part = whole[_inside(both, box.offset)]
    shard.tensor.view(shard.shape)[_inside(both, shard.offset)] = part.to(shard.tensor)
    return part.numel()


def _inside(both: tuple[slice, ...], offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(part.start - first, part.stop - first)
        for part, first in zip(both, offset, strict=True)
    )
