"""How weights of a checkpoint of megatron-core match those of our model, and how both compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtrain.ckpt.store import Checkpoint
from mtrain.config.run import RunConfig
from mtrain.convert.compare import OfCheckpoint, Source
from mtrain.convert.match import OurTensor, our_tensors
from mtrain.convert.out import Weights
from mtrain.convert.torch_dist_read import TorchDistReader
from mtrain.models.gpt.torch_dist import VOCABULARY, one_name
from mtrain.models.table import SAME, Copy, Entry, Operation, Table

MOST_PADDING = 8192
"""Rows of a table of token ids beyond the vocabulary: fewer, as 128 for each of 64 tensor-parallel ranks make."""


def _rows(tensors: list[torch.Tensor], model: Any) -> list[torch.Tensor]:
    """Rows up to those of our padded vocabulary, whatever theirs is padded to; unchanged where it is another's."""
    (table,), ids, rows = tensors, model.vocab_size, model.padded_vocab_size
    if not ids <= len(table) < ids + MOST_PADDING:
        return tensors
    if len(table) < rows:
        return [torch.cat([table, table.new_zeros(rows - len(table), *table.shape[1:])])]
    return [table[:rows]]


PADDING = Operation("padded vocabulary", _rows, lambda tensors, model: tensors)
"""Theirs is padded to a multiple of their own; ours to one of 128. Rows that both have are kept as they are."""


def torch_dist_name(tensor: OurTensor) -> str:
    """The one name that a tensor of ours has in a checkpoint of megatron-core."""
    spec = tensor.specs[0]
    return one_name(spec.key, spec.offset[: spec.lead])


def table_of(ours: Mapping[str, OurTensor]) -> Table:
    """The table of a model's weights; it is made of megatron-core's own names for our model (`ShardSpec`)."""
    return Table(
        once=tuple(_entry(name, torch_dist_name(tensor)) for name, tensor in ours.items()),
        layer=(),
        copies=(Copy(VOCABULARY[1], VOCABULARY[0]),),
    )


def _entry(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), PADDING if theirs in VOCABULARY else SAME)


@dataclass(frozen=True)
class _Cut:
    """Weights whose tables of token ids have no padding."""

    source: Source
    ids: int

    @property
    def names(self) -> frozenset[str]:
        return self.source.names

    def tensor(self, name: str) -> torch.Tensor:
        found = self.source.tensor(name)
        return found[: self.ids] if name in VOCABULARY else found


def beside(reader: TorchDistReader, checkpoint: Checkpoint, run: RunConfig) -> list[Source]:
    """The weights of a checkpoint of megatron-core and those of one of ours, to be compared; padding is left out.

    Raises:
        CorruptData: the checkpoint of ours lacks a weight of the run's model.
    """
    weights = Weights(checkpoint, run, table_of(our_tensors(run)))
    return [_Cut(source, run.model.vocab_size) for source in (reader, OfCheckpoint(weights))]
