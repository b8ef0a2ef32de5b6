"""A checkpoint's weights as one of megatron-core's format `torch_dist`, a layer or an expert at a
time.

torch.distributed.checkpoint writes it: `FileSystemWriter` asks its planner for each tensor when it
comes to it, so that the whole model is never in memory.
"""

from __future__ import annotations

import io
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.hashes import hash_bytes
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.convert.certificate import Record
from mtrain.convert.exporter import Weights
from mtrain.convert.megatron.arguments import COMMON
from mtrain.convert.megatron.arguments_compared import arguments_of
from mtrain.convert.megatron.torch_dist import BACKEND, RELEASE, TRACKER
from mtrain.convert.raw_arrays import IN_TORCH, as_tensor, buffer_of
from mtrain.models.gpt.torch_dist import gathered, modules_with_state, names_written
from mtrain.models.table import Step

VERSION = 3.0
"""`checkpoint_version` of Megatron-LM, which defines an order of queries, keys and values."""


@dataclass(frozen=True)
class _Piece:
    """The result of a step: a weight, or its place in the tensor of all layers or experts."""

    step: Step
    name: str
    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    again: bool = False
    """True if the same weight was already written under another name."""

    @property
    def offset(self) -> tuple[int, ...]:
        return self.numbers + (0,) * len(self.shape)

    @property
    def box(self) -> tuple[int, ...]:
        return (1,) * len(self.numbers) + self.shape


@dataclass
class _Planner(SavePlanner):
    """The planner, which makes each tensor when the writer requests it."""

    weights: Weights
    pieces: list[_Piece]
    record: Record
    by_place: dict[tuple[str, tuple[int, ...]], _Piece] = field(default_factory=dict)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.by_place = {(piece.name, piece.offset): piece for piece in self.pieces}

    def create_local_plan(self) -> SavePlan:
        counts: dict[str, list[int]] = {}
        for piece in self.pieces:
            known = counts.setdefault(piece.name, [0] * len(piece.numbers))
            counts[piece.name] = [max(a, n + 1) for a, n in zip(known, piece.numbers, strict=True)]
        # several weights of a module share one state
        states = dict.fromkeys(
            key for piece in self.pieces for key in _states(piece, counts[piece.name])
        )
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in states]
        return SavePlan([*objects, *(_item(piece, counts[piece.name]) for piece in self.pieces)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            # megatron-core's loader asks for the key, and accepts None
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        piece = self.by_place[index.fqn, tuple(index.offset or ())]
        ((_, made),) = self.weights.of_step(piece.step, None if piece.again else self.record)
        assert (made.words.shape, made.dtype) == (piece.shape, piece.dtype), piece.name
        place = f"{piece.name}{list(piece.numbers)}" if piece.numbers else piece.name
        self.record.target[place] = (
            made.dtype,
            piece.shape,
            made.sha256 or hash_bytes(buffer_of(made.words)),
        )
        return as_tensor(made.words, made.dtype).view(piece.box)


def _states(piece: _Piece, counts: list[int]) -> Iterator[str]:
    """Yield the keys of module state that megatron-core requires, which may be None."""
    place, of = (".".join(map(str, numbers)) for numbers in (piece.numbers or (0,), counts or (1,)))
    for module in modules_with_state(piece.name):
        yield f"{module}._extra_state/shard_{place}_{of}"


def _item(piece: _Piece, counts: list[int]) -> WriteItem:
    properties = TensorProperties(dtype=getattr(torch, IN_TORCH[piece.dtype]))
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.box))
    data = TensorWriteData(chunk, properties, torch.Size((*counts, *piece.shape)))
    return WriteItem(
        MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data
    )


def _pieces(weights: Weights, model: ModelConfig, *, stacked: bool) -> Iterator[_Piece]:
    made = {one.name: one for one in weights.made()}
    for step in weights.found.steps:
        (name,) = step.theirs
        for number, written in enumerate(names_written(name, model)):
            tensor, numbers = gathered(written, layers=stacked)
            yield _Piece(
                step, tensor, numbers, made[name].shape, made[name].dtype, again=number > 0
            )


def export_torch_dist(weights: Weights, run: RunConfig, out: Path, *, stacked: bool) -> Record:
    """Write the folder `release`, and the file that names it for Megatron-LM, into the folder
    `out`.

    One file holds all weights. Peak memory is that of the largest weight: an embedding, or one
    layer's or expert's.

    Args:
        weights: of the checkpoint, with the table of `table_of`.
        run: whose model it is.
        out: an existing folder.
        stacked: layers lie along the first axis of one tensor, as megatron-core has it where all
            layers are alike.

    Raises:
        CorruptData: the checkpoint cannot be read.
    """
    record = Record()
    # Megatron-LM loads it at iteration 0, and without an optimizer
    folder = out / RELEASE
    folder.mkdir()
    planner = _Planner(weights, list(_pieces(weights, run.model, stacked=stacked)), record)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not in use
        try:
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(folder, thread_count=1),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:  # around whatever was raised, also an interruption
            ((cause, _), *_) = error.failures.values()
            raise cause from None
    content = {"singleton_local_shards": False, "non_homogeneous_layers": not stacked}
    common = {
        "args": Namespace(**arguments_of(run)),
        "checkpoint_version": VERSION,
        "iteration": 0,
        "content_metadata": content,
    }
    torch.save(common, folder / COMMON)
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    ckpt_folder.write_json(folder / BACKEND, backends | {f"{name}_version": 1 for name in backends})
    (out / TRACKER).write_text(RELEASE)
    return record
