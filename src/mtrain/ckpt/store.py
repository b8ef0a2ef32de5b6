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
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mtrain import durable, strict_json, units
from mtrain.ckpt import folder, hashes, index, local, shard_file, sources, space
from mtrain.ckpt.contents import IN_TORCH, OWN, Contents, on_host
from mtrain.ckpt.meeting import Meeting, alive
from mtrain.ckpt.pieces import Region, parts
from mtrain.errors import BadEnvironment, CorruptData, MtrainError, TrainingError
from mtrain.mcore.state.sharding import TensorShard
from mtrain.world.heartbeat import tick

READ_BYTES = 16 << 20
"""The most that is read at once."""
WRITTEN_BYTES = 4 << 20
"""The most that is written at once."""


AT_ONCE = 8
"""Tensors that are read from an object store at a time."""


@dataclass
class Frozen:
    """This rank's constant tensors: written once, and linked in every further checkpoint."""

    shards: Iterable[TensorShard] = ()
    path: Path | None = None
    """The file in the newest checkpoint that was written here."""
    index: dict[str, Any] | None = None
    """Its pieces, and the facts of the file."""

    def known(self) -> dict[str, Any] | None:
        """Return path and index of the file, if it is still there and can be linked."""
        there = self.index is not None and self.path is not None and self.path.is_file()
        if not there or not durable.has_links():
            return None
        return {"path": str(self.path), "index": self.index}


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
    algorithm: hashes.Algorithm = hashes.XXH3,
) -> Path:
    """Write a checkpoint together with all other ranks and commit it.

    `shards` are this rank's tensors, of which it saves the primary ones; `extra` are tensors that
    only this rank has (its generators); `state` is the same on all ranks and goes into the
    manifest. `frozen` tensors are saved too, and remembered for the next time. Until the rename at
    the end the folder has a name that no reader takes for a checkpoint. Rank 0 calls `committed`
    after the rename, while the others wait. Blocks are hashed with `algorithm`.

    Each rank touches only its own files; rank 0 touches those of all, once, or of all groups (see
    `index`). The ranks meet in the store, so none of them waits in a collective of the device for a
    slow disk.

    Raises:
        TrainingError: the disk has no room for the files of all ranks, found before the first byte
            is written; or it is not writable. On all ranks; nothing that was committed before is
            touched.
    """
    final = root / folder.folder_name(step)
    draft = folder.draft_of(root, step)
    own = Contents.of(folder.shard_name(ranks.rank), shards, extra, algorithm)
    files = [own.file]
    if frozen is not None and frozen.known() is None:
        name = folder.frozen_name(ranks.rank)
        files.append(Contents.of(name, frozen.shards, algorithm=algorithm).file)
    total, _ = ranks.total(space.to_write(files))

    def write() -> None:
        written = [_written(draft / own.file.name, own)]
        if frozen is not None:
            written.append(_keep_frozen(draft, frozen, ranks.rank, algorithm))
        index.write(draft, ranks.rank, ranks.size, written)

    def gather() -> None:
        if index.of_group(draft, ranks.rank, ranks.size) is not None:
            index.gather(draft, ranks.rank, ranks.size)

    def commit() -> None:
        folder.commit(
            draft,
            final,
            {
                "step": step,
                "ranks": ranks.size,
                "state": state,
                **index.merged(draft, ranks.size, part=local.PART in state),
            },
        )
        committed()

    # Three meetings: the folder before its files, and all files before the manifest. One more where
    # groups of ranks merge their indices.
    _together(ranks, draft, lambda: _begin(draft, run_yaml, total, ranks.size), alone=True)
    _together(ranks, draft, write)
    if index.sharded(ranks.size):
        _together(ranks, draft, gather)
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
        except (OSError, SafetensorError, CorruptData) as error:
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


def _keep_frozen(
    draft: Path, frozen: Frozen, rank: int, algorithm: hashes.Algorithm
) -> dict[str, Any]:
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
    contents = Contents.of(path.name, frozen.shards, algorithm=algorithm)
    frozen.index = _written(path, contents)
    return frozen.index


def _written(path: Path, contents: Contents) -> dict[str, Any]:
    """Write a file; return its index."""
    tensors = iter((*contents.changing, *contents.still))
    # one tensor of a device at a time in host memory
    return shard_file.write(
        path, contents.file, lambda _: shard_file.parts(on_host(next(tensors)), WRITTEN_BYTES)
    )


@dataclass
class Checkpoint:
    """A committed checkpoint, opened and checked."""

    path: Path
    manifest: dict[str, Any]
    patience_s: float = 0.0
    """The time that a disk may take to answer a read before the rank counts as hanging."""
    address: str | None = None
    """The address that the folder stands for; None: the folder has the shards itself."""

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Checkpoint:
        """Read the manifest; with `verify`, compare every byte of every file with its hash.

        Without, only blocks that are read later are compared.

        Raises:
            CorruptData: no manifest, one that is cut or altered, or a file that is missing or
                altered, by name.
            BadEnvironment: a file may not be read.
        """
        manifest = folder.read_manifest(path, verify=verify)
        return cls(path, manifest, address=sources.address_of(path))

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
                    manifest = folder.read_manifest(path, verify=False)
                    answer = {"manifest": manifest, "address": sources.address_of(path)}
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
        return cls(path, answer["manifest"], ranks.timeout_s, answer["address"])

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
        reader = self._reader
        with alive(self.patience_s) if self.patience_s else nullcontext():
            if self.address is None:
                for shard in shards:
                    reader.fill(shard)
                return
            # A store takes milliseconds for each range.
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(reader.fill, list(shards)):
                    pass

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
        entries = [entry for entry in reader.files[name].header.entries if entry.startswith(OWN)]
        return {entry.removeprefix(OWN): reader.whole(name, entry) for entry in entries}


class _Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.root = checkpoint.path
        manifest = checkpoint.manifest
        self.tensors = manifest["tensors"]
        self.index = index.Index(self.root, manifest)
        self.files = hashes.Files(self.root, manifest["files"])

    @torch.no_grad()
    def fill(self, shard: TensorShard) -> None:
        """Fill a shard's memory from the pieces that meet it; several threads may call this."""
        tick()
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
        for part in parts(wanted, self.index.pieces(shard.key, wanted), limit, what):
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
                f"{shard.name}: {entry} has numbers of kind {shard.entry(entry).dtype}"
            )
        data = shard.read(entry, start * dtype.itemsize, stop * dtype.itemsize)
        return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
