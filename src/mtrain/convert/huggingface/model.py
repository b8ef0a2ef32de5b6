"""The import of a whole Hugging Face folder: configuration, weights and companion files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.compose.dump import override, spell
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.model import VALUE_HEAD, ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import adapt, model_boxes
from mtrain.convert.certificate import Record
from mtrain.convert.huggingface.folder import (
    COMPANIONS,
    CONFIG,
    MAX_COMPANION_BYTES,
    Folder,
    open_folder,
)
from mtrain.convert.raw_arrays import IN_TORCH
from mtrain.data.chats.template import FILES as BESIDE_TOKENIZER
from mtrain.durable import sync
from mtrain.errors import ConfigError, CorruptData, Problem
from mtrain.models.gpt.hf import SCORE
from mtrain.models.registry import family_of, imported
from mtrain.models.table import Table
from mtrain.plan.count import parameters
from mtrain.recipes.huggingface.exporter import differing, same_model, shipped
from mtrain.recipes.huggingface.importer import import_config, kind_of, read_json
from mtrain.recipes.imported import Imported
from mtrain.units import count

if TYPE_CHECKING:
    import torch

FEW = 3
"""Differing keys of which each is named with its fix."""
HEAD = f"{VALUE_HEAD}.weight"
KEPT = "hf"
"""Folder of a run with the companion files of imported weights."""
TOKENIZER = "tokenizer.json"
MOST_TIMES = 4
"""Parameters per number of a folder: mxfp4 has two in one."""
PADDING = 1 << 24
"""Parameters that only pad the vocabulary of a small model."""


def configuration(
    config: Path, extra: Sequence[str] = (), wanted: ModelConfig | None = None
) -> tuple[str, Imported]:
    """Return the kind of a `config.json`, and the run that it is with overrides; `wanted` is the
    model that it is to be.

    Raises:
        ConfigError: the model would compute something else than transformers' does, key by key.
    """
    found = import_config(config, extra)
    settled = family_of(found.run.model).settled
    if settled is not None:
        given = {word.partition("=")[0] for word in extra}
        # keys that only the names of the weights show
        words = imported(settled)(
            found.run.model, open_folder(config.parent).tensors.keys(), wanted
        )
        words = [word for word in words if word.partition("=")[0] not in given]
        if words:
            found = import_config(config, (*extra, *words))
            found.notes.append(
                f"its weights are of a model with {' '.join(words)}, which its configuration does"
                " not say"
            )
    wrong = differing(found)
    if wrong:
        raise ConfigError([Problem("MT703", "", None, text, "", str(config)) for text in wrong])
    return kind_of(read_json(config, str(config))), found


def tables(kind: str, model: ModelConfig) -> tuple[Table, ...]:
    """Return the tables of weights of a `model_type`, as the family of the model knows it."""
    found: tuple[Table, ...] = imported(family_of(model).files)(kind, model)
    return found


def layer_table(kind: str) -> Table:
    """Return the table with the names of transformers' own layers of a `model_type`, which may not
    be those of files.

    Raises:
        ConfigError: it is of a family whose layers have no adapters.
    """
    from mtrain.models.gpt.hf import TABLES
    from mtrain.models.hybrid.hf import LAYERS

    known: dict[str, Table] = {**TABLES, **LAYERS}
    if kind not in known:
        raise ConfigError(
            [Problem("MT521", "", kind, "models of this kind have no adapters", "peft=none")]
        )
    return known[kind]


def open_matching(run: RunConfig, source: Path) -> tuple[str, Folder]:
    """Return the kind of model of a folder, and the folder as it was read: its model is that of the
    run.

    Raises:
        ConfigError: the model of the run is another one, key by key.
        CorruptData: the weights are not whole.
    """
    folder = open_folder(source)
    kind, read = configuration(folder.config, wanted=run.model)
    there = resolve(read.run, Machine.here())
    apart = same_model(run.model, there.model)
    if apart:
        raise ConfigError(_apart(run, there, [f"model.{key}" for key in apart], source))
    if run.model.mtp_held != there.model.mtp_held:
        rule = (
            f"the weights in {source} have {there.model.mtp_held} MTP layers, and the model"
            f" {run.model.mtp_held}"
        )
        fix = override("model.mtp_num_layers", there.model.mtp_num_layers)
        raise ConfigError(
            [Problem("MT503", "model.mtp_num_layers", run.model.mtp_num_layers, rule, fix)]
        )
    numbers = sum(prod(tensor.shape) for tensor in folder.tensors.values())
    # a small file must not make this process take memory for a giant
    if parameters(run.model) > MOST_TIMES * numbers + PADDING:
        described = f"{folder.config} describes {count(parameters(run.model))} parameters"
        raise CorruptData(f"{described}, and its weights are {count(numbers)} numbers")
    return kind, folder


def _apart(run: RunConfig, there: RunConfig, keys: list[str], source: Path) -> Iterator[Problem]:
    """Yield a problem for each key of the model that differs from the weights'."""
    mine = run.flat()
    values = there.flat()
    # keys that differ only once they are resolved are named if there are no others
    keys = [key for key in keys if mine.get(key) != values.get(key)] or keys
    known = shipped(there.model)
    if known:
        other = f"model={known}"
    else:
        other = "leave the choice of model out, and it is that of the weights"
    for key in keys:
        fix = override(key, values.get(key)) if len(keys) <= FEW else other
        rule = f"the weights in {source} are of another model: there it is {spell(values.get(key))}"
        yield Problem("MT503", key, mine.get(key), rule, fix)


def import_model(run: RunConfig, source: Path, home: Path) -> tuple[str, Path, Record, Folder]:
    """Import the weights of `source` into the run folder `home` as the checkpoint of step 0, and
    copy the companion files.

    Returns:
        The kind of model, the checkpoint, what was done, and the folder as it was read.

    Raises:
        ConfigError: the model of the run is another one, key by key.
        CorruptData: see `import_weights`.
    """
    kind, folder = open_matching(run, source)
    from mtrain.convert.huggingface.reader import Reader
    from mtrain.convert.importer import import_weights

    adapters = None
    if run.peft.init_from is not None:
        adapt()
        from mtrain.convert.peft.folder import read_adapters

        adapters = read_adapters(Path(run.peft.init_from).expanduser(), run, layer_table(kind))
    reader = Reader(folder)
    given = tables(kind, run.model)
    boxes = model_boxes(run)
    if run.model.head and SCORE not in reader.names:
        held, values = adapters or ({}, {})
        own = {HEAD: boxes.pop(HEAD)}
        dtype = reader.dtype(next(iter(folder.tensors)))
        adapters = ({**held, **own}, {**values, HEAD: _new_head(run, dtype)})
    checkpoint, record = import_weights(reader, given, run, home / CHECKPOINTS, boxes, adapters)
    (home / KEPT).mkdir(exist_ok=True)
    # kept unchanged, for an export back
    for name in (CONFIG, *COMPANIONS):
        copy_if_present(source / name, home / KEPT / name)
    # the tokenizer of the run's data takes precedence
    if not (home / TOKENIZER).exists():
        for name in (TOKENIZER, *BESIDE_TOKENIZER):
            copy_if_present(source / name, home / name)
    return kind, checkpoint, record, folder


def _new_head(run: RunConfig, dtype: str) -> torch.Tensor:
    """Return the value head that a run begins with, as a new model has it."""
    import torch

    from mtrain.assembly import philox

    stream = philox.Stream.of(f"{run.trainer.seed}/{HEAD}/")
    bits = stream.rows(0, 1, run.model.hidden_size, (0, run.model.hidden_size), None)
    values = philox.normal(bits) * run.model.value_head_std
    return values.to(getattr(torch, IN_TORCH[dtype]))


def copy_if_present(source: Path, to: Path) -> None:
    """Copy a small file, if it exists."""
    if source.is_file() and source.stat().st_size <= MAX_COMPANION_BYTES:
        shutil.copyfile(source, to)
        sync(to)
