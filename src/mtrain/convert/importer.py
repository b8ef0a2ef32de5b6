"""The importer: foreign weights become a checkpoint, tensor by tensor, without torch.

The whole model is never in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mtrain import durable, strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import hashes
from mtrain.ckpt.new_file import Writer
from mtrain.config.compose.dump import run_yaml
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box
from mtrain.convert.certificate import Record
from mtrain.convert.compare import NamedWeights, difference
from mtrain.convert.match import check_shape, match
from mtrain.convert.prefetch import prefetched
from mtrain.convert.raw_arrays import FLOATS, IN_TORCH, RawArray, buffer_of, of_tensor
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData
from mtrain.models.table import Step, Table

if TYPE_CHECKING:
    import torch

FILE_BYTES = 4 << 30
Adapters = tuple[Mapping[str, Box], Mapping[str, "torch.Tensor"]]
"""Tensors of mtrain that no table has, with their content, by name."""


class Source(NamedWeights, Protocol):
    """Weights by the names that a table has for them; `Reader` is one."""

    def nbytes(self, name: str) -> int: ...
    def hash_of(self, name: str) -> str:
        """Return the hex sha256 of a weight that was read unchanged, else ""."""
        ...


@dataclass(frozen=True)
class _Made:
    """A tensor of the new checkpoint."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass
class _Files:
    """The files of a checkpoint."""

    draft: Path
    source: Source
    model: Any
    ours: Mapping[str, Box]
    algorithm: hashes.Algorithm
    made: dict[str, _Made] = field(default_factory=dict)

    def write(self, steps: Sequence[Step]) -> dict[str, _Made]:
        """Write the tensors that the steps make.

        Raises:
            CorruptData: a tensor cannot be read, or does not have the shape that its step needs.
        """
        grouped = ckpt_folder.by_file(steps, self._nbytes, FILE_BYTES)
        for number, held in enumerate(grouped):
            self._write_file(ckpt_folder.shard_name(number), held)
        return self.made

    def _write_file(self, file: str, steps: list[Step]) -> None:
        most = {
            name: hashes.room_for(self._most(step, name), self.algorithm)
            for step in steps
            for name in step.ours
        }
        with Writer(self.draft / file, most, _room(most, self.algorithm)) as writer:
            hashed: dict[str, str] = {}
            whole: dict[str, str] = {}
            for step, made in prefetched(self._of_step, steps, self._nbytes):
                for name, (words, dtype, sha256, blocks) in zip(step.ours, made, strict=True):
                    writer.write(name, dtype, words.shape, buffer_of(words))
                    hashed[name] = blocks
                    whole[name] = sha256
                    self.made[name] = _Made(file, dtype, words.shape, sha256)
            writer.close(hashes.metadata_of(hashed, whole, self.algorithm))

    def _nbytes(self, step: Step) -> int:
        return sum(map(self.source.nbytes, step.theirs))

    def _most(self, step: Step, name: str) -> int:
        """Return the most bytes of a tensor to write; it may have more rows than its source."""
        return max(
            self._nbytes(step), prod(self.ours[name].size) * BYTES[_dtype(self.source, step)]
        )

    def _of_step(self, step: Step) -> list[tuple[RawArray, str, str, str]]:
        """Return the results of a step, each with its format, hash and hashes of blocks."""
        dtype = _dtype(self.source, step)
        given = [self.source.tensor(name) for name in step.theirs]
        try:
            made = step.operation.apply(given, self.model, inward=True)
        except (ValueError, IndexError) as error:
            shapes = ", ".join(
                f"{name} {list(one.shape)}"
                for name, one in zip(step.theirs[:3], given, strict=False)
            )
            text = f"{shapes} do not make our {step.ours[0]}: {error}"
            raise CorruptData(f"tensors have shapes of another model: {text}") from None
        # by identity: an operation that returns its input has not changed it
        known = {
            id(one): self.source.hash_of(name) for name, one in zip(step.theirs, given, strict=True)
        }
        # a view, as of a transposed weight, becomes bytes in order
        whole = [(np.ascontiguousarray(one), known.get(id(one))) for one in made]
        return [(one, dtype, *_hashes(one, sha256, self.algorithm)) for one, sha256 in whole]


def import_weights(
    source: Source,
    tables: Sequence[Table],
    run: RunConfig,
    root: Path,
    ours: Mapping[str, Box],
    adapters: Adapters | None = None,
) -> tuple[Path, Record]:
    """Write the weights of a source as the checkpoint of step 0 under `root`, by an atomic rename.

    `ours` are the tensors of the run's model, to which `adapters` are added. Peak memory is that of
    the tensors of a few steps. The checkpoint has no optimizer state: training from it begins at
    step 0.

    Raises:
        CorruptData: the folder's tensors are not those of the run's model, or cannot be read.
    """
    draft = ckpt_folder.draft_of(root, 0)
    final = root / ckpt_folder.folder_name(0)
    draft.mkdir(parents=True)
    try:
        (draft / ckpt_folder.RUN_FILE).write_text(run_yaml(run.recorded()))
        durable.sync(draft / ckpt_folder.RUN_FILE)
        body, record = _written(draft, source, tables, run, ours, adapters)
        ckpt_folder.commit(draft, final, body)
    # an interruption, too, leaves no half of a checkpoint
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final, record


def _written(
    draft: Path,
    source: Source,
    tables: Sequence[Table],
    run: RunConfig,
    ours: Mapping[str, Box],
    adapters: Adapters | None,
) -> tuple[dict[str, Any], Record]:
    """Write all files into `draft`, and return their manifest and the record."""
    found = match(tables, run.model, ours, source.names)
    # all tensors first: the check of shapes needs the finished ones
    algorithm = hashes.ALGORITHMS[run.checkpoint.hash]
    made = _Files(draft, source, run.model, ours, algorithm).write(found.steps)
    # a copy that differs would be lost without a word
    _check_copies(source, found.copies)
    tensors: dict[str, Any] = {}
    record = Record()
    for step in found.steps:
        for name in step.ours:
            check_shape(step, name, made[name].shape, ours[name])
            _note(tensors, record, name, made[name], ours[name])
    if adapters is not None:
        # numbered after the files of the model
        number = len({one.file for one in made.values()})
        own = _write_adapters(draft, number, adapters, algorithm)
        for name, one in own.items():
            _note(tensors, record, name, one, adapters[0][name])
        made = made | own
    facts = {
        name: hashes.wrote(draft / name)
        for name in dict.fromkeys(one.file for one in made.values())
    }
    record.note_read(source, found)
    # resuming begins at step 0, with a new optimizer
    state = {"weights_only": True}
    return {
        "step": 0,
        "ranks": len(facts),
        "state": state,
        "tensors": tensors,
        "files": facts,
    }, record


def _write_adapters(
    draft: Path, number: int, adapters: Adapters, algorithm: hashes.Algorithm
) -> dict[str, _Made]:
    """Write adapters into a file of their own."""
    file = ckpt_folder.shard_name(number)
    made = dict[str, _Made]()
    most = {
        name: hashes.room_for(tensor.nbytes, algorithm)
        for name, tensor in adapters[1].items()
        if name in adapters[0]
    }
    hashed: dict[str, str] = {}
    whole: dict[str, str] = {}
    with Writer(draft / file, adapters[0], _room(most, algorithm)) as writer:
        for name in adapters[0]:
            words, dtype = of_tensor(adapters[1][name].contiguous())
            whole[name], hashed[name] = _hashes(words, None, algorithm)
            writer.write(name, dtype, words.shape, buffer_of(words))
            made[name] = _Made(file, dtype, words.shape, whole[name])
        writer.close(hashes.metadata_of(hashed, whole, algorithm))
    return made


def _note(tensors: dict[str, Any], record: Record, name: str, made: _Made, box: Box) -> None:
    """Add a tensor to those of the manifest, and to the record."""
    record.target[name] = (made.dtype, made.shape, made.sha256)
    empty = {"shape": list(box.global_shape), "dtype": IN_TORCH[made.dtype], "pieces": []}
    place = {
        "file": made.file,
        "entry": name,
        "offset": list(box.offset),
        "shape": list(box.size),
        "flat": None,
    }
    tensors.setdefault(f"{ckpt_folder.MODEL}{box.key}", empty)["pieces"].append(place)


def _dtype(source: Source, step: Step) -> str:
    kinds = {source.dtype(name) for name in step.theirs}
    # a tensor has one format, and mtrain does not choose which of several to round to
    if len(kinds) > 1:
        raise CorruptData(
            f"{', '.join(step.theirs[:3])} have different number formats and make one tensor of"
            " ours"
        )
    (dtype,) = kinds
    if dtype not in FLOATS:
        raise CorruptData(f"{step.theirs[0]} has numbers of kind {dtype}, which is no weight's")
    return dtype


def _room(most: Mapping[str, str], algorithm: hashes.Algorithm) -> int:
    """Return the length of a header's metadata with hashes of at most this length."""
    whole = dict.fromkeys(most, "0" * hashes.SHA256_DIGITS)
    return len(strict_json.dumps(hashes.metadata_of(most, whole, algorithm)))


def _hashes(words: RawArray, sha256: str | None, algorithm: hashes.Algorithm) -> tuple[str, str]:
    """Return the hex sha256 of a tensor's bytes, which may be known, and those of its blocks."""
    data = buffer_of(words)
    blocks = hashes.hash_blocks(data, algorithm)
    if algorithm is hashes.SHA256 and len(data) <= hashes.BLOCK_BYTES:
        return blocks, blocks  # of one block, both hashes are the same
    return sha256 or hashes.hash_bytes(data), blocks


def _check_copies(source: Source, copies: dict[str, str]) -> None:
    """Raise CorruptData for a tensor with other numbers than its original."""
    for name, of in copies.items():
        apart = difference(source, name, of)
        if apart:
            raise CorruptData(
                f"the configuration says that {name} and {of} are one tensor, and they are two:"
                f" {apart}. Releases of transformers take different ones of them",
                f"where {name} is a weight of its own, say so (tie_word_embeddings: false in"
                " config.json, or model.tie_word_embeddings=false); where it is out of date, leave"
                " it out of the folder",
            )
