"""The table between weights of a megatron-core checkpoint and our model, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, model_boxes
from mtrain.convert.checkpoint_reader import CheckpointReader
from mtrain.convert.compare import CheckpointWeights, NamedWeights
from mtrain.convert.exporter import Weights
from mtrain.convert.megatron.reader import TorchDistReader
from mtrain.convert.raw_arrays import RawArray
from mtrain.errors import CorruptData
from mtrain.models.gpt.torch_dist import VOCABULARY, one_name
from mtrain.models.table import SAME, Copy, Entry, Operation, Table, with_rows

MOST_PADDING = 8192
"""Fewer padded rows beyond the vocabulary than 128 for each of 64 ranks."""


def _rows(tensors: list[Any], model: Any) -> list[Any]:
    """Return rows up to our padded vocabulary; unchanged for another vocabulary."""
    (table,) = tensors
    ids = model.vocab_size
    rows = model.padded_vocab_size
    # another model's: `match` reports its shape
    if not ids <= len(table) < ids + MOST_PADDING:
        return tensors
    # Megatron-LM may pad to less than a multiple of 128
    if len(table) < rows:
        return [with_rows(table, rows)]
    return [table[:rows]]


PADDING = Operation("padded vocabulary", _rows, lambda tensors, model: tensors)
"""Megatron-LM pads to its own multiple; mtrain to one of 128.

Rows that both have are kept as they are.
"""


def torch_dist_name(box: Box) -> str:
    """Return the one name of a run's tensor in a checkpoint of megatron-core."""
    return one_name(box.key, box.offset[: box.lead])


def table_of(ours: Mapping[str, Box]) -> Table:
    """Return the table of a model's weights, from megatron-core's names (`ShardSpec`)."""
    return Table(
        once=tuple(_entry(name, torch_dist_name(tensor)) for name, tensor in ours.items()),
        layer=(),
        # a tied model may store the head as well
        copies=(Copy(VOCABULARY[1], VOCABULARY[0]),),
    )


def _entry(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), PADDING if theirs in VOCABULARY else SAME)


def check_shapes(reader: TorchDistReader, ours: Mapping[str, Box], ids: int) -> None:
    """Compare shapes before any number is read; a table of token ids may have rows that only pad.

    Raises:
        CorruptData: one is another, by both names.
    """
    for own, tensor in ours.items():
        name = torch_dist_name(tensor)
        if name not in reader.names:  # `match` reports it
            continue
        shape = reader.shape(name)
        padded = (
            name in VOCABULARY
            and len(shape) == len(tensor.shape)
            and ids <= shape[0] < ids + MOST_PADDING
        )
        if shape != tensor.shape and not (padded and shape[1:] == tensor.shape[1:]):
            theirs = f"{reader.parts(name)[0]} makes a tensor of shape {list(shape)}"
            raise CorruptData(f"{theirs}, and our {own} has {list(tensor.shape)}")


@dataclass(frozen=True)
class _Cut:
    """Weights whose tables of token ids have no padding."""

    source: NamedWeights
    ids: int

    @property
    def names(self) -> frozenset[str]:
        return self.source.names

    def dtype(self, name: str) -> str:
        return self.source.dtype(name)

    def tensor(self, name: str) -> RawArray:
        found = self.source.tensor(name)
        return found[: self.ids] if name in VOCABULARY else found


def comparable_weights(
    reader: TorchDistReader, checkpoint: CheckpointReader, run: RunConfig
) -> list[NamedWeights]:
    """Return the weights of a megatron-core and of an mtrain checkpoint to compare, unpadded.

    Raises:
        CorruptData: mtrain's checkpoint lacks a weight of the run's model.
    """
    ours = model_boxes(run)
    weights = Weights(checkpoint, run, table_of(ours), ours)
    return [_Cut(source, run.model.vocab_size) for source in (reader, CheckpointWeights(weights))]
