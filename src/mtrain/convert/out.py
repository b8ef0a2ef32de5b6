"""A checkpoint's weights as a Hugging Face folder, tensor by tensor: never the whole model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.hashes import hash_bytes
from mtrain.ckpt.store import Checkpoint
from mtrain.config.run import RunConfig
from mtrain.convert.certificate import Record
from mtrain.convert.folder import INDEX, WEIGHTS
from mtrain.convert.match import Match, OurTensor, our_adapters, our_tensors, shapes_of_theirs, written
from mtrain.convert.read import NAMES, buffer_of
from mtrain.convert.tensor_file import Writer, in_turn
from mtrain.errors import CorruptData
from mtrain.mcore.merging import Whole, is_adapter, merged, names_beside, one_hot_of
from mtrain.mcore.sharding import TensorShard
from mtrain.models.table import Step, Table

FILE_BYTES = 5_000_000_000
"""Of a file at most, unless one tensor alone is larger: as most published folders have it."""
MAIN = "optim/main_weight/"
"""What a checkpoint calls the weights in fp32 from which the model's own, in half precision, are rounded."""


@dataclass(frozen=True)
class _Made:
    """A tensor of theirs that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Weights:
    """The weights of a checkpoint by Hugging Face's names, its adapters merged into them."""

    def __init__(
        self, checkpoint: Checkpoint, run: RunConfig, table: Table, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: what they are written in; None: as the checkpoint has them. fp32 comes from main weights.

        Raises:
            CorruptData: the checkpoint lacks a weight of the model, or the table does not fit it.
        """
        self.checkpoint, self.model, self.ours = checkpoint, run.model, our_tensors(run)
        self.dtype = dtype
        self.found: Match = written(table, run.model, self.ours)
        held = checkpoint.manifest["tensors"]
        lacks = [s.key for t in self.ours.values() for s in t.specs if f"{ckpt_folder.MODEL}{s.key}" not in held]
        if lacks:
            raise CorruptData(f"{checkpoint.path} has no {', '.join(lacks[:8])}")
        self.run, self.adapters = run, our_adapters(run) if any(map(is_adapter, held)) else {}

    def adapter_of(self, weight: str, record: Record | None = None) -> Whole | None:
        """The adapter of one of our weights; None: it has none."""
        names = names_beside(weight)
        if names is None or names.a not in self.adapters:
            return None
        tensors = (self._read(self.adapters[name], record) if name in self.adapters else None for name in names)
        return Whole(*tensors)  # type: ignore[arg-type]

    def made(self) -> list[_Made]:
        """What `tensors` gives, in its order."""
        out = []
        for step in self.found.steps:
            dtype = self.dtype if self.dtype is not None and self._may_change(step) else self._stored(step)
            shapes = shapes_of_theirs(step, self.model, self.ours)
            out += [_Made(name, shape, dtype) for name, shape in shapes.items()]
        by_name = {one.name: one for one in out}
        return out + [_Made(n, by_name[of].shape, by_name[of].dtype) for n, of in self.found.copies.items()]

    def tensors(self, record: Record | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of theirs; `record` notes what it was made of.

        Raises:
            CorruptData: the checkpoint cannot be read, or is not what was written.
        """
        for step in self.found.steps:
            yield from self.of_step(step, record)
        for name, of in self.found.copies.items():
            step = next(step for step in self.found.steps if of in step.theirs)
            yield name, dict(self.of_step(step, None))[of]

    def of_step(self, step: Step, record: Record | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of theirs that a step makes; `record` notes of what."""
        given = [self._own(self.ours[name], record) for name in step.ours]
        made = step.operation.apply(given, self.model, inward=False)
        if record is not None:
            own = [*step.ours, *(n for name in step.ours for n in names_beside(name) or () if n in self.adapters)]
            operation = f"merged, {step.operation.name}" if len(own) > len(step.ours) else step.operation.name
            record.steps.append({"theirs": list(step.theirs), "operation": operation, "ours": own})
        for name, tensor in zip(step.theirs, made, strict=True):
            wanted = self.dtype if self.dtype is not None and self._may_change(step) else tensor.dtype
            yield name, tensor.to(wanted).contiguous()

    def _own(self, tensor: OurTensor, record: Record | None) -> torch.Tensor:
        """A whole tensor of ours, with its adapter."""
        out, adapter = self._read(tensor, record), self.adapter_of(tensor.name, record)
        if adapter is None:
            return out
        wide = out if self.dtype is None else out.to(self.dtype)
        return merged(wide, adapter, one_hot_of(tensor.name, adapter, self.model), self.run.peft.scale)

    def _read(self, tensor: OurTensor, record: Record | None) -> torch.Tensor:
        """A whole tensor as the checkpoint has it.

        Raises:
            CorruptData: it cannot be read, or is not what was written.
        """
        out = torch.empty(tensor.shape, dtype=self._dtype_of(tensor))
        flat = out.view(-1)
        for spec in tensor.specs:
            part = flat[spec.first : spec.first + spec.numel].view(spec.shape[spec.lead :])
            key = self._key(spec.key)
            self.checkpoint.load([TensorShard(key, spec.global_shape, spec.offset, spec.shape, part)])
        if record is not None:
            alone = len(tensor.specs) == 1 and prod(spec.global_shape) == out.numel()
            known = self.checkpoint.hash_of(key) if alone else None
            record.source[tensor.name] = (NAMES[out.dtype], out.shape, known or hash_bytes(buffer_of(out)))
        return out

    def _key(self, key: str) -> str:
        main = f"{MAIN}{key}"
        wanted = self.dtype == torch.float32 and main in self.checkpoint.manifest["tensors"]
        return main if wanted else f"{ckpt_folder.MODEL}{key}"

    def _dtype_of(self, tensor: OurTensor) -> torch.dtype:
        entry = self.checkpoint.manifest["tensors"][self._key(tensor.specs[0].key)]
        found: torch.dtype = getattr(torch, entry["dtype"])
        return found

    def _stored(self, step: Step) -> torch.dtype:
        return self._dtype_of(self.ours[step.ours[0]])

    def _may_change(self, step: Step) -> bool:
        """Not the biases that balance routers: they are kept in full, and chosen by."""
        return not step.ours[0].endswith("expert_bias")


def export_weights(weights: Weights, out: Path) -> Record:
    """Write the safetensors files, and their index where there are several, into the folder `out`."""
    record = Record(copies=weights.found.copies)
    files = list(ckpt_folder.by_file(weights.made(), lambda one: one.nbytes, FILE_BYTES))
    made = weights.tensors(record)
    many = len(files) > 1
    placed: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if many else WEIGHTS
        writer = Writer(out / name, [(one.name, NAMES[one.dtype], one.shape) for one in held], {"format": "pt"})
        with in_turn() as beside:
            for one in held:
                key, tensor = next(made)
                assert (key, tensor.dtype, tuple(tensor.shape)) == (one.name, one.dtype, one.shape)
                placed[key] = name
                beside(_put, writer, record, one, tensor)
        writer.close()
    if many:
        total = sum(one.nbytes for held in files for one in held)
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        ckpt_folder.write_json(out / INDEX, body)
    return record


def _put(writer: Writer, record: Record, one: _Made, tensor: torch.Tensor) -> None:
    data = buffer_of(tensor)
    writer.write(one.name, data)
    record.target[one.name] = (NAMES[one.dtype], one.shape, hash_bytes(data))
