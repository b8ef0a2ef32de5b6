"""A whole checkpoint of megatron-core: imported, or exported for Megatron-LM to load."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.schema.run import RunConfig
from mtrain.convert.certificate import Record
from mtrain.convert.huggingface.model import MOST_TIMES, PADDING
from mtrain.convert.megatron.torch_dist import TorchDist, open_torch_dist
from mtrain.errors import ConfigError, CorruptData, Problem
from mtrain.models.gpt.torch_dist import is_weight, layers_are_alike
from mtrain.plan.count import parameters
from mtrain.units import count

if TYPE_CHECKING:
    from mtrain.convert.checkpoint_reader import CheckpointReader

KIND = "torch_dist"
"""The name of the format in a certificate."""
LAYOUTS = ("stacked", "apart")
"""Layouts of layers in an export: one tensor of all, or a tensor for each layer."""


def open_weights(source: Path) -> TorchDist:
    """Return a checkpoint whose weights can be read; see `open_torch_dist`."""
    return open_torch_dist(source, is_weight)


def import_checkpoint(run: RunConfig, source: TorchDist, home: Path) -> tuple[Path, Record]:
    """Import the weights of `source` into the run folder `home` as the checkpoint of step 0.

    Optimizer state, generators and TransformerEngine's state of fp8 are left out. Peak memory is
    that of the tensors of a few layers, or of the embedding.

    Raises:
        CorruptData: the weights are not those of the run's model, by name, or cannot be read.
    """
    numbers = sum(
        prod(tensor.shape) for tensor in source.tensors.values() if is_weight(tensor.name)
    )
    # before memory is taken for a model that is too large for these weights
    if parameters(run.model) > MOST_TIMES * numbers + PADDING:
        described = f"the model has {count(parameters(run.model))} parameters"
        raise CorruptData(
            f"{described}, and the weights in {source.path} are {count(numbers)} numbers"
        )
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.importer import import_weights
    from mtrain.convert.megatron.reader import TorchDistReader
    from mtrain.convert.megatron.table import check_shapes, table_of

    reader = TorchDistReader(source)
    ours = model_boxes(run)
    # shapes first: to compare them is cheap, and to read numbers is not
    check_shapes(reader, ours, run.model.vocab_size)
    return import_weights(reader, (table_of(ours),), run, home / CHECKPOINTS, ours)


def export_checkpoint(
    checkpoint: CheckpointReader, run: RunConfig, out: Path, dtype: str | None, layers: str | None
) -> Record:
    """Write the weights of `checkpoint` into the folder `out` as Megatron-LM loads them with
    `--load`.

    Args:
        checkpoint: of a run.
        run: whose model it is.
        out: an existing folder.
        dtype: number format to write; None: that of the checkpoint.
        layers: one of `LAYOUTS`; None: stacked where all layers are alike, as megatron-core's own
            default is.

    Raises:
        ConfigError: layers are not alike and are to be stacked.
        CorruptData: the checkpoint cannot be read.
    """
    alike = layers_are_alike(run.model)
    if layers == LAYOUTS[0] and not alike:
        rule = (
            "some layers of the model have experts and some have none, so one tensor cannot hold"
            " those of all"
        )
        raise ConfigError(
            [Problem("MT003", "layers", layers, rule, f"layers={LAYOUTS[1]}", "command line")]
        )
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.exporter import Weights
    from mtrain.convert.megatron.table import table_of
    from mtrain.convert.megatron.writer import export_torch_dist

    ours = model_boxes(run)
    weights = Weights(checkpoint, run, table_of(ours), ours, dtype)
    return export_torch_dist(
        weights, run, out, stacked=alike if layers is None else layers == LAYOUTS[0]
    )
