"""The exporter: a checkpoint's weights become a Hugging Face folder, tensor by tensor.

The whole model is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.hashes import hash_bytes
from mtrain.ckpt.new_file import Writer
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, adapter_boxes
from mtrain.convert.certificate import Record
from mtrain.convert.checkpoint_reader import CheckpointReader
from mtrain.convert.huggingface.folder import INDEX, WEIGHTS
from mtrain.convert.match import Match, export_match, shapes_of_theirs
from mtrain.convert.prefetch import prefetched
from mtrain.convert.raw_arrays import RawArray, as_tensor, buffer_of, converted, of_tensor
from mtrain.convert.safetensors_file import BYTES
from mtrain.errors import CorruptData
from mtrain.models.table import Step, Table

if TYPE_CHECKING:
    from mtrain.mcore.layers.merging import Whole

FILE_BYTES = 5_000_000_000
"""The largest size of a file, unless one tensor is larger, as in most published folders."""


@dataclass(frozen=True)
class _Made:
    """Name, shape and format of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Exported:
    """A tensor under its foreign name, converted."""

    words: RawArray
    dtype: str
    sha256: str = ""
    """The hash, if the tensor is unchanged from the checkpoint, else empty."""

    def hashed(self) -> Exported:
        """Return the same with its hash."""
        return self if self.sha256 else replace(self, sha256=hash_bytes(buffer_of(self.words)))


class Weights:
    """The weights of a checkpoint by Hugging Face's names, its adapters merged into them."""

    def __init__(
        self,
        checkpoint: CheckpointReader,
        run: RunConfig,
        table: Table,
        ours: Mapping[str, Box],
        dtype: str | None = None,
    ) -> None:
        """Match the tensors of a checkpoint with a table.

        Args:
            ours: the place of each tensor of the run's model in a checkpoint.
            dtype: the format to write; None: that of the checkpoint. fp32 comes from main weights.

        Raises:
            CorruptData: the checkpoint lacks a weight of the model, or the table does not fit it.
        """
        self.checkpoint = checkpoint
        self.run = run
        self.model = run.model
        self.ours = ours
        self.dtype = dtype
        self.found: Match = export_match(table, run.model, self.ours)
        held = checkpoint.manifest["tensors"]
        # before anything is written
        lacks = [
            box.key for box in self.ours.values() if f"{ckpt_folder.MODEL}{box.key}" not in held
        ]
        if lacks:
            raise CorruptData(f"{checkpoint.path} has no {', '.join(lacks[:8])}")
        adapters = adapter_boxes(run) if run.peft.kind is not None else {}
        begun = any(f"{ckpt_folder.MODEL}{box.key}" in held for box in adapters.values())
        # weights that were imported have none before a step is made
        self.adapters = adapters if begun else {}

    def adapter_of(self, weight: str, record: Record | None = None) -> Whole | None:
        """Return the adapter of one of our weights, as tensors of torch; None: it has none."""
        names = self._adapter_names(weight)
        if not names:
            return None
        from mtrain.mcore.layers.merging import Whole

        # dora has a magnitude, lora none
        found = {
            name: self._read(name, self.adapters[name], record)
            for name in names
            if name in self.adapters
        }
        tensors = {
            name: as_tensor(np.ascontiguousarray(one.words), one.dtype)
            for name, one in found.items()
        }
        return Whole(*(tensors.get(name) for name in names))  # type: ignore[arg-type]

    def _adapter_names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the tensors of a weight's adapter, if it has one."""
        if not self.adapters:
            return ()
        from mtrain.mcore.layers.merging import names_beside

        names = names_beside(weight)
        return tuple(names) if names is not None and names.a in self.adapters else ()

    def made(self) -> list[_Made]:
        """Return the tensors that the steps make, in order; torch computes their shapes."""
        out = []
        for step in self.found.steps:
            shapes = shapes_of_theirs(step, self.model, self.ours)
            out += [_Made(name, shape, self.dtype_of(step)) for name, shape in shapes.items()]
        return out

    def dtype_of(self, step: Step) -> str:
        """Return the number format of a step's results."""
        return self._wanted(step) or self.checkpoint.dtype(self._key(self.ours[step.ours[0]].key))

    def nbytes(self, step: Step) -> int:
        """Return the bytes of a step's results, with padding."""
        return sum(prod(self.ours[name].shape) for name in step.ours) * BYTES[self.dtype_of(step)]

    def of_step(self, step: Step, record: Record | None) -> Iterator[tuple[str, Exported]]:
        """Yield the target's tensors that a step makes; `record` gets their sources.

        Raises:
            CorruptData: the checkpoint cannot be read, or its hashes differ.
        """
        given = [self._own(name, record) for name in step.ours]
        words = [one.words for one in given]
        made = step.operation.apply(words, self.model, inward=False)
        if record is not None:
            adapters = [
                n for name in step.ours for n in self._adapter_names(name) if n in self.adapters
            ]
            operation = f"merged, {step.operation.name}" if adapters else step.operation.name
            ours = [*step.ours, *adapters]
            record.steps.append({"theirs": list(step.theirs), "operation": operation, "ours": ours})
        dtype = given[0].dtype
        wanted = self.dtype_of(step)
        for name, one in zip(step.theirs, made, strict=True):
            # the identity of the memory shows that no operation changed it
            same = next((g.sha256 for g in given if g.words is one and dtype == wanted), "")
            yield name, Exported(np.ascontiguousarray(converted(one, dtype, wanted)), wanted, same)

    def _own(self, name: str, record: Record | None) -> Exported:
        """Return a whole tensor of the checkpoint, its adapter added."""
        found = self._read(name, self.ours[name], record)
        adapter = self.adapter_of(name, record)
        if adapter is None:
            return found
        from mtrain.mcore.layers.merging import merged, one_hot_of

        # rounded once
        # in fp32, so that base and adapter are rounded together
        weight = as_tensor(converted(np.ascontiguousarray(found.words), found.dtype, "F32"), "F32")
        one = merged(weight, adapter, one_hot_of(name, adapter, self.model), self.run.peft.scale)
        dtype = self.dtype or found.dtype
        return Exported(converted(of_tensor(one)[0], "F32", dtype), dtype)

    def _read(self, name: str, box: Box, record: Record | None) -> Exported:
        """Return a whole tensor as the checkpoint has it."""
        key = self._key(box.key)
        words, sha256 = self.checkpoint.read(key, box)
        found = Exported(words, self.checkpoint.dtype(key), sha256)
        if record is not None:
            record.source[name] = (found.dtype, box.shape, sha256 or hash_bytes(buffer_of(words)))
        return found

    def _key(self, key: str) -> str:
        return self.checkpoint.key(key, main=self.dtype == "F32")

    def _wanted(self, step: Step) -> str | None:
        """Return the requested format of a step's results, or None to keep the checkpoint's.

        Biases that balance routers keep their format: rounding would change the choice of experts.
        """
        return None if step.ours[0].endswith("expert_bias") else self.dtype


def export_weights(weights: Weights, out: Path) -> Record:
    """Write the safetensors files, and an index of several, into the folder `out`."""
    record = Record(copies=weights.found.copies)
    step_of = {name: step for step in weights.found.steps for name in step.theirs}
    todo = [(step, step.theirs, step.theirs) for step in weights.found.steps]
    # a copy is made again rather than kept in memory
    todo += [(step_of[of], (of,), (name,)) for name, of in weights.found.copies.items()]

    def made_of(
        one: tuple[Step, tuple[str, ...], tuple[str, ...]],
    ) -> tuple[dict[str, Exported], Record]:
        noted = Record()
        return {
            name: made.hashed() for name, made in weights.of_step(one[0], noted) if name in one[1]
        }, noted

    files = list(ckpt_folder.by_file(todo, lambda one: weights.nbytes(one[0]), FILE_BYTES))
    many = len(files) > 1
    placed: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if many else WEIGHTS
        with Writer(out / file, [name for _, _, names in held for name in names]) as writer:
            for (_, made, names), (tensors, noted) in prefetched(
                made_of, held, lambda one: weights.nbytes(one[0])
            ):
                # a copy is written a second time, and was recorded with its original
                if made == names:
                    record.add(noted)
                for key, name in zip(made, names, strict=True):
                    one = tensors[key]
                    writer.write(name, one.dtype, one.words.shape, buffer_of(one.words))
                    record.target[name] = (one.dtype, one.words.shape, one.sha256)
                    placed[name] = file
            writer.close({"format": "pt"})
    if many:
        # the index as transformers writes it
        total = sum(prod(shape) * BYTES[dtype] for dtype, shape, _ in record.target.values())
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        ckpt_folder.write_json(out / INDEX, body)
    return record
