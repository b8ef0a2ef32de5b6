"""Checkpoints as safetensors shards under one JSON manifest, readable in any layout.

A whole tensor is a set of pieces. A piece is a box (offset and shape in the whole tensor), or a
flat range of a box where the distributed optimizer cut it. A rank that needs a box reads whichever
pieces meet it, so the layout that reads need not be the layout that wrote.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mtrain import durable, strict_json, units
from mtrain.ckpt import folder, hashes, shards, space
from mtrain.ckpt.meeting import Meeting, alive
from mtrain.ckpt.pieces import Region, parts
from mtrain.errors import BadEnvironment, CorruptData, MtrainError, TrainingError
from mtrain.mcore.state.sharding import TensorShard
from mtrain.world.heartbeat import tick

READ_BYTES = 16 << 20
"""The most that is read at once."""
IN_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Number format as safetensors names it -> as torch does."""


@dataclass
class Frozen:
    """This rank's tensors that no step changes: written once, and in every further checkpoint a
    link to the file.
    """

    shards: Iterable[TensorShard] = ()
    path: Path | None = None
    """The file in the newest checkpoint that was written here."""
    index: dict[str, Any] | None = None
    """Its pieces, and the facts of the file."""

    def to_write(self) -> list[TensorShard]:
        """Return the tensors that the next checkpoint writes; none if it links to the file."""
        written = self.index is not None and self.path is not None and self.path.is_file()
        return [] if written and durable.has_links() else list(self.shards)


def save(
    root: Path,
    step: int,
    shards: Iterable[TensorShard],
    extra: dict[str, torch.Tensor],
    state: dict[str, Any],
    run_yaml: str,
    ranks: Meeting,
    frozen: Frozen | None = None,
    committed: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint together with all other ranks and commit it.

    `shards` are this rank's tensors, of which it saves the primary ones; `extra` are tensors that
    only this rank has (its generators); `state` is the same on all ranks and goes into the
    manifest. `frozen` tensors are saved too, and remembered for the next time. Until the rename at
    the end the folder has a name that no reader takes for a checkpoint. Rank 0 calls `committed`
    after the rename, while the others wait.

    Each rank touches only its own files; rank 0 touches those of all, once. The ranks meet in the
    store, so none of them waits in a collective of the device for a slow disk.

    Raises:
        TrainingError: the disk has no room for the files of all ranks, found before the first byte
            is written; or it is not writable. On all ranks; nothing that was committed before is
            touched.
    """
    final = root / folder.folder_name(step)
    draft = folder.draft_of(root, step)
    shards = list(shards)
    own = [*shards, *(frozen.to_write() if frozen is not None else ())]
    total = ranks.total(space.to_write(own, extra))

    def write() -> None:
        written = [_write_shard(draft / folder.shard_name(ranks.rank), shards, extra)]
        if frozen is not None:
            written.append(_keep_frozen(draft, frozen, ranks.rank))
        folder.write_json(draft / f"rank_{ranks.rank:05d}.json", {"written": written})

    def commit() -> None:
        folder.commit(
            draft,
            final,
            {"step": step, "ranks": ranks.size, "state": state, **_merge(draft, ranks.size)},
        )
        committed()

    # Three meetings: the folder before its files, and all files before the manifest.
    _together(ranks, draft, lambda: _begin(draft, run_yaml, total, ranks.size), alone=True)
    _together(ranks, draft, write)
    _together(ranks, draft, commit, alone=True)
    if frozen is not None:
        frozen.path = final / folder.frozen_name(ranks.rank)
    return final


def _begin(draft: Path, run_yaml: str, nbytes: int, ranks: int) -> None:
    # Left by saves that were killed: their space is free for this one.
    folder.sweep(draft.parent)
    draft.mkdir(parents=True)
    space.require(draft, nbytes, ranks)
    durable.sync(draft.parent.parent)
    durable.write(draft / folder.RUN_FILE, run_yaml.encode())


def _together(
    ranks: Meeting, draft: Path, work: Callable[[], None], *, alone: bool = False
) -> None:
    """Do the work, on rank 0 only with `alone`, and wait for all ranks; where the disk refuses one,
    all of them fail.

    Raises:
        TrainingError: the disk refused some of the work, the same on every rank.
    """
    problem = ""
    if ranks.rank == 0 or not alone:
        try:
            with alive(ranks.timeout_s):
                work()
        except (OSError, SafetensorError) as error:
            # the folder may not exist yet: the space of the disk that it would be on
            existing = next(p for p in (draft, *draft.parents) if os.path.exists(p))
            free = units.bytes_(shutil.disk_usage(existing).free)
            problem = f"the checkpoint {draft} cannot be written ({free} free): {error}"
    problem = ranks.barrier(problem)
    if problem:
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        # `shared`: every rank raises it, and one of them prints it
        failed = TrainingError(problem)
        failed.shared = True
        raise failed


def _keep_frozen(draft: Path, frozen: Frozen, rank: int) -> dict[str, Any]:
    """Link the file of an earlier checkpoint into a draft, or write it if there is no such file."""
    path = draft / folder.frozen_name(rank)
    if frozen.index is not None and frozen.path is not None:
        try:
            if durable.linked(frozen.path, path):
                if path.stat().st_size == frozen.index["file"]["bytes"]:
                    return frozen.index
                path.unlink()
        except OSError:  # it was pruned
            path.unlink(missing_ok=True)
    frozen.index = _write_shard(path, frozen.shards, {})
    return frozen.index


def _write_shard(
    path: Path, own: Iterable[TensorShard], extra: dict[str, torch.Tensor]
) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[dict[str, Any]] = []
    for shard in own:
        if not shard.primary:
            continue
        tick()
        entry = f"{shard.key}@{len(pieces)}"
        tensors[entry] = shard.tensor.detach().cpu().contiguous()
        pieces.append(
            {
                "key": shard.key,
                "global_shape": list(shard.global_shape),
                "dtype": str(shard.tensor.dtype).removeprefix("torch."),
                "offset": list(shard.offset),
                "shape": list(shard.shape),
                "flat": list(shard.flat) if shard.flat else None,
                "file": path.name,
                "entry": entry,
            }
        )
    tensors |= {f"rank/{key}": value.cpu().contiguous() for key, value in extra.items()}
    hashed = {entry: hashes.hash_blocks(_bytes(tensor)) for entry, tensor in tensors.items()}
    # Two shards may be the same memory (a tied weight): safetensors wants each entry to own its
    # bytes.
    shards.write(path, _unshared(tensors), hashes.metadata_of(hashed))
    durable.sync(path)
    return {"pieces": pieces, "file": {"name": path.name, **hashes.wrote(path)}}


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor, as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return out


def _merge(draft: Path, size: int) -> dict[str, Any]:
    """Return the manifest's tensors and files from the index that each rank left in the draft."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank in range(size):
        path = draft / f"rank_{rank:05d}.json"
        written = json.loads(path.read_text())["written"]
        # The index of a rank is of the draft: the manifest has all of it.
        path.unlink()
        files |= {
            i["file"]["name"]: {k: i["file"][k] for k in ("bytes", "header_sha256")}
            for i in written
        }
        for piece in (piece for index in written for piece in index["pieces"]):
            empty = {"shape": piece["global_shape"], "dtype": piece["dtype"], "pieces": []}
            entry = tensors.setdefault(piece["key"], empty)
            entry["pieces"].append(
                {k: piece[k] for k in ("file", "entry", "offset", "shape", "flat")}
            )
    return {"tensors": tensors, "files": files}


@dataclass
class Checkpoint:
    """A committed checkpoint, opened and checked."""

    path: Path
    manifest: dict[str, Any]
    patience_s: float = 0.0
    """The time that a disk may take to answer while it is read, before the rank counts as hanging.
    """

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Checkpoint:
        """Read the manifest; with `verify`, compare every byte of every file with its hash.

        Without, only blocks that are read later are compared.

        Raises:
            CorruptData: no manifest, one that is cut or altered, or a file that is missing or
                altered, by name.
            BadEnvironment: a file may not be read.
        """
        return cls(path, folder.read_manifest(path, verify=verify))

    @classmethod
    def open_together(cls, path: Path, ranks: Meeting) -> Checkpoint:
        """Open it on every rank: rank 0 reads the manifest and looks for the files, and sends the
        manifest to the others.

        Readers compare blocks with their hashes later.

        Raises:
            CorruptData, BadEnvironment: as `open`, the same on every rank.
        """
        # thousands of ranks that ask for the state of every file would stall a network disk
        answer: dict[str, Any] = {}
        if ranks.rank == 0:
            try:
                with alive(ranks.timeout_s):
                    answer = {"manifest": folder.read_manifest(path, verify=False)}
            except (CorruptData, BadEnvironment) as error:
                answer = {"refused": type(error).__name__, "lines": str(error).split("\n")}
        answer = json.loads(ranks.tell(strict_json.dumps(answer)))
        if "refused" in answer:
            kinds: dict[str, type[MtrainError]] = {
                "CorruptData": CorruptData,
                "BadEnvironment": BadEnvironment,
            }
            refused = kinds[answer["refused"]](*answer["lines"])
            refused.shared = True
            raise refused
        return cls(path, answer["manifest"], ranks.timeout_s)

    @property
    def step(self) -> int:
        """Return the number of updates that were made when it was saved."""
        return int(self.manifest["step"])

    @property
    def state(self) -> dict[str, Any]:
        """Return the facts that the trainer wrote next to the tensors."""
        return dict(self.manifest["state"])

    @cached_property
    def _reader(self) -> _Reader:
        return _Reader(self)

    def load(self, shards: Iterable[TensorShard]) -> None:
        """Fill every shard's memory from the pieces that meet it.

        Raises:
            CorruptData: a tensor that is missing, of another shape, not covered by its pieces, or
                not as written.
        """
        with torch.no_grad(), alive(self.patience_s) if self.patience_s else nullcontext():
            for shard in shards:
                tick()
                self._reader.fill(shard)

    def whole(self, key: str) -> torch.Tensor:
        """Return one tensor put together from all of its pieces.

        Raises:
            CorruptData: its pieces do not make it up, or are not as they were written.
        """
        entry = self.manifest["tensors"][key]
        shape = tuple(entry["shape"])
        out = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        self.load([TensorShard(key, shape, (0,) * len(shape), shape, out)])
        return out

    def rank_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tensors that only `rank` saved; empty if it saved none."""
        name = folder.shard_name(rank)
        reader = self._reader
        if name not in self.manifest["files"]:
            return {}
        entries = [
            entry for entry in reader.files[name].header.entries if entry.startswith("rank/")
        ]
        return {entry.removeprefix("rank/"): reader.whole(name, entry) for entry in entries}


class _Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.root = checkpoint.path
        manifest = checkpoint.manifest
        self.tensors = manifest["tensors"]
        self.files = hashes.Files(self.root, manifest["files"])

    def fill(self, shard: TensorShard) -> None:
        entry = self.tensors.get(shard.key)
        if entry is None:
            raise CorruptData(f"{self.root} has no tensor {shard.key}")
        if tuple(entry["shape"]) != shard.global_shape:
            raise CorruptData(
                f"{self.root}: {shard.key} has shape {entry['shape']}, not"
                f" {list(shard.global_shape)}"
            )
        wanted = Region(shard.offset, shard.shape, shard.flat)
        # on the host, in the order of the region: the shard may be on a device, or not contiguous
        memory = torch.empty(wanted.size, dtype=shard.tensor.dtype)
        what = f"{self.root}: the pieces of {shard.key}"
        limit = READ_BYTES // shard.tensor.element_size()
        for part in parts(wanted, entry["pieces"], limit, what):
            tick()
            elements = self.elements(part.piece, part.start, part.stop).as_strided(
                part.shape, part.there
            )
            memory.as_strided(part.shape, part.here, part.at).copy_(elements)
        shard.tensor.copy_(memory.view(shard.tensor.shape))

    def elements(self, piece: Mapping[str, Any], start: int, stop: int) -> torch.Tensor:
        """Read elements [start, stop) of a piece."""
        held = self.files[piece["file"]].entry(piece["entry"])
        size = (
            prod(piece["shape"]) if piece["flat"] is None else piece["flat"][1] - piece["flat"][0]
        )
        if prod(held.shape) != size:
            where = f"{self.root / piece['file']}: {piece['entry']}"
            raise CorruptData(
                f"{where} has shape {list(held.shape)}, and the manifest says {size} elements"
            )
        return self._read(piece["file"], piece["entry"], start, stop)

    def whole(self, name: str, entry: str) -> torch.Tensor:
        """Read an entry of a shard."""
        shape = self.files[name].entry(entry).shape
        return self._read(name, entry, 0, prod(shape)).view(shape)

    def _read(self, name: str, entry: str, start: int, stop: int) -> torch.Tensor:
        shard = self.files[name]
        dtype = IN_TORCH.get(shard.entry(entry).dtype)
        if dtype is None:
            raise CorruptData(
                f"{shard.path}: {entry} has numbers of kind {shard.entry(entry).dtype}"
            )
        data = shard.read(entry, start * dtype.itemsize, stop * dtype.itemsize)
        return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
