"""The index of a checkpoint: which file has which piece of a tensor. Needs no torch.

Each rank leaves an index of its files in the draft. Up to `MOST_WHOLE` ranks, rank 0 merges them
into the manifest. Where there are more, no process reads the indices of all: the first rank of
each `GROUP` merges those of its group into a file of the checkpoint, `index_00000.json`, and rank 0
reads only these files. Its manifest then has shape and number format of each tensor, the groups
that hold pieces of it and between which elements, and size and hash of every file, those of the
groups among them. A reader opens the groups that may hold its elements, and compares each with its
sha256.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder, hashes
from mtrain.ckpt.pieces import Piece, Region
from mtrain.ckpt.reading import read_at
from mtrain.durable import not_read
from mtrain.errors import CorruptData
from mtrain.world.heartbeat import tick

MOST_WHOLE = 256
"""Ranks whose pieces the manifest has itself."""
GROUP = 64
"""Ranks whose indices one of them merges."""
THREADS = 16
"""Files that are read at a time: a network disk takes milliseconds to answer for each."""


def sharded(size: int) -> bool:
    """Return whether a checkpoint of `size` ranks has files of groups."""
    return size > MOST_WHOLE


def group_name(group: int) -> str:
    """Return the name of the file of a group's pieces."""
    return f"index_{group:05d}.json"


@dataclass(frozen=True)
class Awaited:
    """Files that appear in a draft, each when a rank has done its part."""

    place: Path
    ranks: Mapping[str, int]
    """Name of the file -> rank."""

    def missing(self) -> set[int]:
        """Return the ranks whose file is not there yet."""
        there: set[str] = set()
        with suppress(FileNotFoundError):  # the first member makes the folder of its group
            there = set(os.listdir(self.place))
        return {rank for name, rank in self.ranks.items() if name not in there}


def of_group(draft: Path, rank: int, size: int) -> Awaited | None:
    """Return the files that a rank waits for before `gather`; None: it merges no group."""
    if not sharded(size) or rank % GROUP:
        return None
    members = range(rank, min(rank + GROUP, size))
    return Awaited(_place(draft, rank, size), {_name(member): member for member in members})


def of_all(draft: Path, size: int) -> Awaited:
    """Return the files that rank 0 waits for before `merged`."""
    if sharded(size):
        firsts = range(0, size, GROUP)
        return Awaited(draft, {group_name(first // GROUP): first for first in firsts})
    return Awaited(draft, {_name(rank): rank for rank in range(size)})


def write(draft: Path, rank: int, size: int, written: list[dict[str, Any]]) -> None:
    """Leave the index of a rank's files, which are on disk; it appears at once and whole."""
    place = _place(draft, rank, size)
    hidden = place / f".{_name(rank)}"
    body = {"written": written}
    try:
        folder.write_json(hidden, body)
    except FileNotFoundError:  # the first of its group: for the others, it would be a call too many
        place.mkdir(exist_ok=True)
        folder.write_json(hidden, body)
    os.rename(hidden, place / _name(rank))


def gather(draft: Path, rank: int, size: int) -> None:
    """Merge the indices of a group into its file, on the first rank of the group.

    Raises:
        OSError: the disk refuses.
    """
    awaited = of_group(draft, rank, size)
    assert awaited is not None
    name = group_name(rank // GROUP)
    body = _merged_ranks(awaited)
    for entry in body["tensors"].values():
        entry["span"] = _span(entry)
        entry["elements"] = _elements(entry)
    folder.write_json(draft / f".{name}", body)
    os.rename(draft / f".{name}", draft / name)
    shutil.rmtree(awaited.place)


def merged(draft: Path, size: int, *, part: bool = False) -> dict[str, Any]:
    """Return the manifest's tensors and files, when everything that `of_all` names is there.

    `part`: the ranks hold only a part of the tensors. The index of a rank is of the draft, and
    removed; the file of a group is of the checkpoint.

    Raises:
        OSError: the disk refuses.
        CorruptData: the ranks wrote only a part of a tensor, which is named.
    """
    awaited = of_all(draft, size)
    if not sharded(size):
        body = _merged_ranks(awaited)
        for key, entry in body["tensors"].items():
            if not part:
                _require_whole(key, entry["shape"], _elements(entry))
        for name in awaited.ranks:
            (draft / name).unlink()
        return body
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    elements = Counter[str]()
    with ThreadPoolExecutor(THREADS) as pool:
        bodies = pool.map(Path.read_bytes, (draft / name for name in awaited.ranks))
        for group, data in enumerate(bodies):
            tick()
            body = json.loads(data)
            files[group_name(group)] = {"bytes": len(data), "sha256": hashes.hash_bytes(data)}
            files |= body["files"]
            for key, held in body["tensors"].items():
                new = {"shape": held["shape"], "dtype": held["dtype"], "groups": []}
                tensors.setdefault(key, new)["groups"].append([group, *held["span"]])
                elements[key] += held["elements"]
    for key, entry in tensors.items() if not part else ():
        _require_whole(key, entry["shape"], elements[key])
    return {"tensors": tensors, "files": files}


def _name(rank: int) -> str:
    """Return the name of the index of a rank, in a draft."""
    return f"rank_{rank:05d}.json"


def _place(draft: Path, rank: int, size: int) -> Path:
    """Return the folder of a rank's index: one for each group, so its first rank lists less."""
    return draft / f".group_{rank // GROUP:05d}" if sharded(size) else draft


def _merged_ranks(awaited: Awaited) -> dict[str, Any]:
    """Return the tensors, with their pieces, and the files of some ranks."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for name in awaited.ranks:
        tick()
        written = json.loads((awaited.place / name).read_bytes())["written"]
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


def _span(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first element of a tensor's pieces, and the one after the last."""
    spans = [_region(piece).span(tuple(entry["shape"])) for piece in entry["pieces"]]
    spans = [one for one in spans if one[0] < one[1]] or [(0, 0)]
    return min(low for low, _ in spans), max(high for _, high in spans)


def _elements(entry: Mapping[str, Any]) -> int:
    """Return the elements of a tensor's pieces; one that several ranks wrote counts once."""
    return sum({_region(piece): _region(piece).size for piece in entry["pieces"]}.values())


def _require_whole(key: str, shape: Sequence[int], elements: int) -> None:
    """Compare the elements that ranks wrote of a tensor with all that it has.

    A checkpoint that lacks some could not be loaded: better to learn that when it is saved.
    """
    if elements < prod(shape):
        raise CorruptData(f"the ranks wrote {elements} of the {prod(shape)} elements of {key}")


def _region(piece: Piece) -> Region:
    flat = (piece["flat"][0], piece["flat"][1]) if piece["flat"] else None
    return Region(tuple(piece["offset"]), tuple(piece["shape"]), flat)


class Index:
    """The pieces of the tensors of a committed checkpoint, from its manifest or from the files of
    its groups, which are read when a tensor of theirs is first asked for.
    """

    def __init__(self, root: Path, manifest: Mapping[str, Any]) -> None:
        self._root = root
        self._tensors = manifest["tensors"]
        self._files = manifest["files"]
        self._groups: dict[int, dict[str, Any]] = {}

    def pieces(self, key: str, wanted: Region | None = None) -> list[Piece]:
        """Return the pieces of a tensor that the manifest has: all, or at least those that share
        elements with `wanted`.

        Raises:
            CorruptData: the file of a group is missing, altered or that of another checkpoint.
            BadEnvironment: it may not be read.
        """
        held = self._tensors[key]
        if "groups" not in held:
            own: list[Piece] = held["pieces"]
            return own
        low, high = wanted.span(tuple(held["shape"])) if wanted else (0, prod(held["shape"]))
        groups = [group for group, first, end in held["groups"] if first < high and low < end]
        return [piece for group in groups for piece in self._pieces_in(group, key)]

    def read(self, groups: Iterable[int]) -> None:
        """Read the files of groups at the same time; raises as `pieces` does."""
        missing = sorted(set(groups) - self._groups.keys())
        with ThreadPoolExecutor(THREADS) as pool:
            self._groups |= zip(missing, pool.map(self._read, missing), strict=True)

    def _pieces_in(self, group: int, key: str) -> list[Piece]:
        if group not in self._groups:
            self._groups[group] = self._read(group)
        try:
            found: list[Piece] = self._groups[group][key]["pieces"]
        except (KeyError, TypeError):
            where = self._root / group_name(group)
            raise CorruptData(f"{where} has no pieces of {key}") from None
        return found

    def _read(self, group: int) -> dict[str, Any]:
        name = group_name(group)
        path = self._root / name
        if name not in self._files:
            raise CorruptData(f"{path} does not belong to the checkpoint")
        data = _bytes_of(path, self._files[name]["bytes"])
        if hashes.hash_bytes(data) != self._files[name]["sha256"]:
            raise CorruptData(f"{path} is not what was written: its sha256 differs")
        tensors: dict[str, Any] = json.loads(bytes(data))["tensors"]
        return tensors


def _bytes_of(path: Path, size: int) -> memoryview:
    """Return the bytes of a file that has `size`.

    Raises:
        CorruptData: it is missing, has another size, or is no file.
        BadEnvironment: it may not be read.
    """
    try:
        # A pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CorruptData(f"{path} is missing") from None
    except OSError as error:
        raise not_read(path, error) from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptData(f"{path} is no file")
        if status.st_size != size:
            raise CorruptData(f"{path} has {status.st_size} bytes, {size} were written")
        return read_at(path, file, 0, size)
    finally:
        os.close(file)


def filled(root: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest in which every tensor has its pieces, from the files of all groups.

    Raises:
        CorruptData, BadEnvironment: as `Index.pieces`.
    """
    held = manifest["tensors"]
    index = Index(root, manifest)
    # An edited manifest may have anything in place of an entry: that is for its reader to refuse.
    spread = {k: e for k, e in held.items() if isinstance(e, dict) and "groups" in e}
    index.read(group for entry in spread.values() for group, _, _ in entry["groups"])
    whole = {key: {**entry, "pieces": index.pieces(key)} for key, entry in spread.items()}
    return {**manifest, "tensors": held | whole}
