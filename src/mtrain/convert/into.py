"""A Hugging Face folder into a checkpoint of weights, tensor by tensor: never the whole model in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import hashes
from mtrain.config.dump import run_yaml
from mtrain.config.run import RunConfig
from mtrain.convert.certificate import Record
from mtrain.convert.match import Match, OurTensor, checked, match, our_tensors
from mtrain.convert.read import NAMES, buffer_of
from mtrain.convert.tensor_file import Writer, in_turn
from mtrain.errors import CorruptData
from mtrain.models.table import Step, Table

FILE_BYTES = 4 << 30


class Source(Protocol):
    """Weights by the names that a table has for them; `Reader` is one."""

    @property
    def names(self) -> frozenset[str]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def hash_of(self, name: str) -> str:
        """Hex sha256 of what `tensor` gave, where that is what was read; empty where it is not."""
        ...


@dataclass(frozen=True)
class _Piece:
    """A part of one of our tensors as a checkpoint holds it."""

    entry: str
    spec: Any
    dtype: str


Adapters = tuple[Mapping[str, OurTensor], Mapping[str, torch.Tensor]]
"""Tensors of ours that no table has, and what they hold, by name."""


def import_weights(
    reader: Source,
    tables: Sequence[Table],
    run: RunConfig,
    root: Path,
    ours: dict[str, OurTensor] | None = None,
    adapters: Adapters | None = None,
) -> tuple[Path, Record]:
    """Write the weights of a folder as the checkpoint of step 0 under `root`, which commits it by a rename.

    `ours` are the tensors of the run's model, where they are known; `adapters` are written beside them.

    Peak memory is that of the tensors of a few steps. The checkpoint holds no optimizer state: training from it
    begins at step 0.

    Raises:
        CorruptData: the folder's tensors are not those of the run's model, or cannot be read.
    """
    ours = our_tensors(run) if ours is None else ours
    found = match(tables, run.model, ours, reader.names)
    draft, final = ckpt_folder.draft_of(root, 0), root / ckpt_folder.folder_name(0)
    draft.mkdir(parents=True)
    (draft / ckpt_folder.RUN_FILE).write_text(run_yaml(run.recorded()))
    ckpt_folder.sync(draft / ckpt_folder.RUN_FILE)
    _check_copies(reader, found)
    files = list(ckpt_folder.by_file(found.steps, lambda step: _nbytes(reader, step, ours), FILE_BYTES))
    tensors: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    record = Record()
    for number, steps in enumerate(files):
        name = ckpt_folder.shard_name(number)
        pieces = [piece for step in steps for piece in _pieces(reader, step, ours)]
        hashed = _write(draft / name, reader, steps, pieces, run.model, ours)
        record.target |= {p.entry: (p.dtype, p.spec.shape, hashed[p.entry]) for p in pieces}
        for piece in pieces:
            _note(tensors, piece, name)
        facts[name] = {"bytes": (draft / name).stat().st_size, "header_sha256": hashes.wrote(draft / name)}
    if adapters is not None:
        name = ckpt_folder.shard_name(len(files))
        _write_adapters(draft / name, adapters, tensors, record)
        facts[name] = {"bytes": (draft / name).stat().st_size, "header_sha256": hashes.wrote(draft / name)}
    record.noted(reader, found)
    state = {"weights_only": True}
    body = {"step": 0, "ranks": len(facts), "state": state, "tensors": tensors, "files": facts}
    ckpt_folder.commit(draft, final, body)
    return final, record


def _write_adapters(path: Path, adapters: Adapters, tensors: dict[str, Any], record: Record) -> None:
    ours, held = adapters
    pieces = [piece for name in ours for piece in _pieces_of(ours[name], NAMES[held[name].dtype])]
    parts = (held[n].reshape(-1)[s.first : s.first + s.numel] for n in ours for s in ours[n].specs)
    data = {piece.entry: buffer_of(part.contiguous()) for piece, part in zip(pieces, parts, strict=True)}
    hashed = {entry: hashes.hash_bytes(part) for entry, part in data.items()}
    shapes = [(piece.entry, piece.dtype, piece.spec.shape[piece.spec.lead :]) for piece in pieces]
    writer = Writer(path, shapes, _metadata(hashed))
    for entry, part in data.items():
        writer.write(entry, part)
    writer.close()
    record.target |= {p.entry: (p.dtype, p.spec.shape, hashed[p.entry]) for p in pieces}
    for piece in pieces:
        _note(tensors, piece, path.name)


def _nbytes(reader: Source, step: Step, ours: dict[str, OurTensor]) -> int:
    """Of what a step makes."""
    return sum(prod(ours[name].shape) for name in step.ours) * _dtype(reader, step).itemsize


def _dtype(reader: Source, step: Step) -> torch.dtype:
    kinds = {reader.dtype(name) for name in step.theirs}
    if len(kinds) > 1:
        raise CorruptData(f"{', '.join(step.theirs[:3])} have different number formats and make one tensor of ours")
    (dtype,) = kinds
    if not dtype.is_floating_point:
        raise CorruptData(f"{step.theirs[0]} has numbers of kind {NAMES[dtype]}, which is no weight's")
    return dtype


def _pieces(reader: Source, step: Step, ours: dict[str, OurTensor]) -> Iterator[_Piece]:
    dtype = NAMES[_dtype(reader, step)]
    for name in step.ours:
        yield from _pieces_of(ours[name], dtype)


def _pieces_of(tensor: OurTensor, dtype: str) -> Iterator[_Piece]:
    for number, spec in enumerate(tensor.specs):
        yield _Piece(f"{ckpt_folder.MODEL}{spec.key}@{tensor.name}.{number}", spec, dtype)


def _write(
    path: Path, reader: Source, steps: list[Step], pieces: list[_Piece], model: Any, ours: dict[str, OurTensor]
) -> dict[str, str]:
    """Writes a file; the hash of each of its entries. Reading and writing go on beside each other."""
    hashed = dict.fromkeys((piece.entry for piece in pieces), "0" * 64)
    shapes = [(piece.entry, piece.dtype, piece.spec.shape[piece.spec.lead :]) for piece in pieces]
    writer = Writer(path, shapes, _metadata(hashed))

    def put(entry: str, tensor: torch.Tensor, known: str) -> None:
        data = buffer_of(tensor)
        hashed[entry] = known or hashes.hash_bytes(data)
        writer.write(entry, data)

    todo = iter(pieces)
    with in_turn() as beside:
        for step in steps:
            given = [reader.tensor(name) for name in step.theirs]
            made = checked(step, step.operation.apply(given, model, inward=True), ours)
            for name, tensor in zip(step.ours, made, strict=True):
                flat = tensor.contiguous().reshape(-1)
                for spec in ours[name].specs:
                    part = flat[spec.first : spec.first + spec.numel]
                    beside(put, next(todo).entry, part, _known(reader, step, given, part))
            del given
    writer.close(_metadata(hashed))
    return hashed


def _known(reader: Source, step: Step, given: list[torch.Tensor], part: torch.Tensor) -> str:
    """The hash of what is the memory of a tensor as it was read; empty where it is not."""
    for name, tensor in zip(step.theirs, given, strict=True):
        if tensor.data_ptr() == part.data_ptr() and tensor.nbytes == part.nbytes and tensor.is_contiguous():
            return reader.hash_of(name)
    return ""


def _metadata(hashed: dict[str, str]) -> dict[str, str]:
    return {hashes.ENTRY_HASHES: json.dumps(hashed, sort_keys=True, allow_nan=False)}


def _note(tensors: dict[str, Any], piece: _Piece, file: str) -> None:
    spec = piece.spec
    empty = {"shape": list(spec.global_shape), "dtype": _IN_TORCH[piece.dtype], "pieces": []}
    place = {"file": file, "entry": piece.entry, "offset": list(spec.offset), "shape": list(spec.shape), "flat": None}
    tensors.setdefault(f"{ckpt_folder.MODEL}{spec.key}", empty)["pieces"].append(place)


_IN_TORCH = {name: str(dtype).removeprefix("torch.") for dtype, name in NAMES.items()}


def _check_copies(reader: Source, found: Match) -> None:
    for name, of in found.copies.items():
        if of in reader.names and not torch.equal(reader.tensor(name), reader.tensor(of)):
            raise CorruptData(f"{name} is to hold what {of} does, and holds something else")
