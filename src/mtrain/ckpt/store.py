"""Checkpoints as safetensors shards under one JSON manifest, readable in any layout.

A whole tensor is a set of pieces. A piece is a box (offset and shape in the whole tensor), or a flat range of a box
where the distributed optimizer cut it. A rank that needs a box reads whichever pieces meet it, so the layout that
reads need not be the layout that wrote.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mtrain import durable, units
from mtrain.ckpt import folder, hashes
from mtrain.ckpt.pieces import assemble
from mtrain.errors import CorruptData, TrainingError
from mtrain.mcore.sharding import TensorShard
from mtrain.world.heartbeat import tick


@dataclass(frozen=True)
class Ranks:
    """What saving needs of the other ranks."""

    rank: int
    size: int
    barrier: Callable[[], None]


@dataclass
class Frozen:
    """This rank's tensors that no step changes: written once, and in every further checkpoint a link to the file."""

    shards: Iterable[TensorShard] = ()
    path: Path | None = None
    """The file in the newest checkpoint that was written here."""
    index: dict[str, Any] | None = None
    """What is in it."""


def save(
    root: Path,
    step: int,
    shards: Iterable[TensorShard],
    extra: dict[str, torch.Tensor],
    state: dict[str, Any],
    run_yaml: str,
    ranks: Ranks,
    frozen: Frozen | None = None,
) -> Path:
    """Write a checkpoint together with all other ranks and commit it.

    `shards` are this rank's tensors, of which it saves the primary ones; `extra` are tensors of this rank alone (its
    generators); `state` is the same on all ranks and goes into the manifest. `frozen` tensors are saved too, and
    remembered for the next time. Until the rename at the end the folder has a name that no reader takes for a
    checkpoint.

    Raises:
        TrainingError: the disk is full or not writable; nothing that was committed before is touched.
    """
    final, draft = root / folder.folder_name(step), folder.draft_of(root, step)
    with _says_what_is_missing(draft):
        if ranks.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            durable.sync(root.parent)
            (draft / folder.RUN_FILE).write_text(run_yaml)
            durable.sync(draft / folder.RUN_FILE)
        ranks.barrier()
        written = [_write_shard(draft / folder.shard_name(ranks.rank), shards, extra)]
        if frozen is not None:
            written.append(_keep_frozen(draft, frozen, ranks.rank))
        folder.write_json(draft / f"rank_{ranks.rank:05d}.json", {"written": written})
        ranks.barrier()
        if ranks.rank == 0:
            merged = _merge(draft, ranks.size)
            folder.commit(draft, final, {"step": step, "ranks": ranks.size, "state": state, **merged})
        ranks.barrier()
    if frozen is not None:
        frozen.path = final / folder.frozen_name(ranks.rank)
    return final


def _keep_frozen(draft: Path, frozen: Frozen, rank: int) -> dict[str, Any]:
    """Link the file of an earlier checkpoint into a draft, or write it where there is none."""
    path = draft / folder.frozen_name(rank)
    if frozen.index is not None and frozen.path is not None:
        try:
            os.link(frozen.path, path)
            if path.stat().st_size == frozen.index["file"]["bytes"]:
                return frozen.index
            path.unlink()
        except OSError:  # it is gone, or this file system has no links
            path.unlink(missing_ok=True)
    frozen.index = _write_shard(path, frozen.shards, {})
    return frozen.index


@contextmanager
def _says_what_is_missing(draft: Path) -> Iterator[None]:
    """A disk that is full or not writable, in words; what was written is removed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        existing = next(p for p in (draft, *draft.parents) if p.exists())
        free = units.bytes_(shutil.disk_usage(existing).free)
        raise TrainingError(f"the checkpoint {draft} cannot be written ({free} free): {error}") from None


def _write_shard(path: Path, shards: Iterable[TensorShard], extra: dict[str, torch.Tensor]) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[dict[str, Any]] = []
    for shard in shards:
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
    hashed = {entry: hashes.hash_bytes(_bytes(tensor)) for entry, tensor in tensors.items()}
    # Two shards may be the same memory (a tied weight): safetensors wants each entry to own its bytes.
    save_file(
        _unshared(tensors), path, metadata={hashes.ENTRY_HASHES: json.dumps(hashed, sort_keys=True, allow_nan=False)}
    )
    tick()
    durable.sync(path)
    tick()
    return {
        "pieces": pieces,
        "file": {"name": path.name, "bytes": path.stat().st_size, "header_sha256": hashes.wrote(path)},
    }


def _bytes(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor, as a buffer."""
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
    """The manifest's tensors and files from the index that each rank left in the draft."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank in range(size):
        path = draft / f"rank_{rank:05d}.json"
        written = json.loads(path.read_text())["written"]
        path.unlink()
        files |= {i["file"]["name"]: {k: i["file"][k] for k in ("bytes", "header_sha256")} for i in written}
        for piece in (piece for index in written for piece in index["pieces"]):
            empty = {"shape": piece["global_shape"], "dtype": piece["dtype"], "pieces": []}
            entry = tensors.setdefault(piece["key"], empty)
            entry["pieces"].append({k: piece[k] for k in ("file", "entry", "offset", "shape", "flat")})
    return {"tensors": tensors, "files": files}


@dataclass
class Checkpoint:
    """A committed checkpoint, opened and checked."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Checkpoint:
        """Read the manifest; with `verify`, compare every byte of every file with its hash.

        Without, what is read later is compared then, and nothing else.

        Raises:
            CorruptData: no manifest, one that is cut or altered, or a file that is missing or altered, by name.
        """
        return cls(path, folder.read_manifest(path, verify=verify))

    @property
    def step(self) -> int:
        """Updates that were made when it was saved."""
        return int(self.manifest["step"])

    @property
    def state(self) -> dict[str, Any]:
        """What the trainer wrote beside the tensors."""
        return dict(self.manifest["state"])

    @cached_property
    def _reader(self) -> _Reader:
        return _Reader(self)

    def load(self, shards: Iterable[TensorShard]) -> None:
        """Fill every shard's memory from the pieces that meet it.

        Raises:
            CorruptData: a tensor that is missing, of another shape, not covered by its pieces, or not as written.
        """
        with torch.no_grad():
            for shard in shards:
                tick()
                self._reader.fill(shard)

    def whole(self, key: str) -> torch.Tensor:
        """One tensor put together from all of its pieces.

        Raises:
            CorruptData: its pieces do not make it up, or are not as they were written.
        """
        entry = self.manifest["tensors"][key]
        shape = tuple(entry["shape"])
        out = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        self.load([TensorShard(key, shape, (0,) * len(shape), shape, out)])
        return out

    def rank_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """The tensors that `rank` alone saved, empty if it saved none."""
        name, reader = folder.shard_name(rank), self._reader
        if name not in self.manifest["files"]:
            return {}
        entries = [entry for entry in reader.file(name).keys() if entry.startswith("rank/")]  # noqa: SIM118
        return {entry.removeprefix("rank/"): reader.read(name, entry) for entry in entries}


class _Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.root, manifest = checkpoint.path, checkpoint.manifest
        self.tensors, self.facts = manifest["tensors"], manifest["files"]
        self.files: dict[str, Any] = {}

    def fill(self, shard: TensorShard) -> None:
        entry = self.tensors.get(shard.key)
        if entry is None:
            raise CorruptData(f"{self.root} has no tensor {shard.key}")
        if tuple(entry["shape"]) != shard.global_shape:
            raise CorruptData(f"{self.root}: {shard.key} has shape {entry['shape']}, not {list(shard.global_shape)}")
        exact = self._exact(entry, shard)
        if exact is not None:
            shard.tensor.copy_(exact.view(shard.tensor.shape))
            return
        box, what = torch.empty(shard.shape, dtype=shard.tensor.dtype), f"{self.root}: the pieces of {shard.key}"
        assemble(box, shard.offset, entry["pieces"], self._read, torch.cat, what)
        values = box.view(-1)[shard.flat[0] : shard.flat[1]] if shard.flat else box
        shard.tensor.copy_(values.reshape(shard.tensor.shape))

    def _exact(self, entry: dict[str, Any], shard: TensorShard) -> torch.Tensor | None:
        """The one piece that is this shard, or that a flat shard lies in: the common case of the same layout."""
        for piece in entry["pieces"]:
            if tuple(piece["offset"]) != shard.offset or tuple(piece["shape"]) != shard.shape:
                continue
            if piece["flat"] is None:
                tensor = self._read(piece)
                return tensor.view(-1)[shard.flat[0] : shard.flat[1]] if shard.flat else tensor
            if shard.flat and piece["flat"][0] <= shard.flat[0] and shard.flat[1] <= piece["flat"][1]:
                lo = piece["flat"][0]
                return self._read(piece)[shard.flat[0] - lo : shard.flat[1] - lo]
        return None

    def _read(self, piece: dict[str, Any]) -> torch.Tensor:
        return self.read(piece["file"], piece["entry"])

    def read(self, name: str, entry: str) -> torch.Tensor:
        """One entry of a shard, compared with its hash unless this process did that before."""
        path = self.root / name
        try:
            tensor: torch.Tensor = self.file(name).get_tensor(entry)
        except (SafetensorError, OSError) as error:
            raise CorruptData(f"{path}: {entry} cannot be read: {error}") from None
        hashes.check_entry(path, entry, _bytes(tensor))
        return tensor

    def file(self, name: str) -> Any:
        """A shard, open, whose header is what was written."""
        path = self.root / name
        if name not in self.files:
            if name not in self.facts:
                raise CorruptData(f"{path} is none of the checkpoint's files")
            hashes.check_header(path, self.facts[name])
            try:
                self.files[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptData(f"{path} cannot be read: {error}") from None
        return self.files[name]
