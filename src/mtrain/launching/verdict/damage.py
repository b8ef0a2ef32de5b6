"""Damage of a checkpoint that shows without reading its tensors. Needs no torch.

A run compares sizes and headers before any rank starts; ranks compare the bytes that they read.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder, hashes
from mtrain.ckpt.index import filled
from mtrain.ckpt.sources import ADDRESS
from mtrain.errors import CorruptData

MOST_HEADERS = 1024
"""Headers of shards that one process reads; those of larger checkpoints are left to the ranks."""
MOST_NAMED = 20


def damage(path: Path, manifest: dict[str, Any]) -> list[str]:
    """Return a line for each file, and each tensor of the manifest, that is not as written.

    Raises:
        BadEnvironment: a file may not be read.
    """
    found = list(_files(path, manifest["files"]))
    try:
        found += _tensors(path, filled(path, manifest))
    except CorruptData as error:
        # Usually the file of a group, which is a line already.
        found += [line for line in str(error).split("\n") if line not in found]
    more = len(found) - MOST_NAMED
    return [*found[:MOST_NAMED], *([f"... and {more} more"] if more > 0 else [])]


def strangers(path: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the names of everything in the folder that does not belong to the checkpoint."""
    own = (*manifest["files"], folder.MANIFEST, ADDRESS)
    return sorted(file.name for file in path.iterdir() if file.name not in own)


def _files(path: Path, files: dict[str, Any]) -> Iterator[str]:
    shards = [name for name, facts in files.items() if "header_sha256" in facts]
    headers = set(shards[:MOST_HEADERS])
    there = folder.objects_of(path)

    def fault(name: str) -> str:
        try:
            folder.check_file(path, name, files[name], verify=False, there=there)
            # A shard of another step may have the same size: only its header tells.
            if name in headers:
                hashes.checked(path / name, files[name]).close()
        except CorruptData as error:
            return str(error)
        except (KeyError, TypeError):
            return f"{path / folder.MANIFEST}: says nothing of {name} that can be compared"
        return ""

    if there is None:
        yield from filter(None, map(fault, files))
        return
    # A store takes milliseconds for each request.
    with ThreadPoolExecutor(folder.LOOKS) as pool:
        yield from filter(None, pool.map(fault, files))


def _tensors(path: Path, manifest: dict[str, Any]) -> Iterator[str]:
    for key, entry in manifest["tensors"].items():
        try:
            whole = prod(entry["shape"])
            pieces = {
                (tuple(p["offset"]), tuple(p["shape"]), tuple(p["flat"] or ())): p["file"]
                for p in entry["pieces"]
            }
            covered = sum(flat[1] - flat[0] if flat else prod(shape) for _, shape, flat in pieces)
            lost = sorted({file for file in pieces.values() if file not in manifest["files"]})
        except (KeyError, TypeError, ValueError, IndexError):
            yield f"{path / folder.MANIFEST}: {key} is not described as a tensor"
            continue
        if covered != whole:
            yield f"{path}: the pieces of {key} cover {covered} of {whole} elements"
        if lost:
            yield f"{path / lost[0]} does not belong to the checkpoint, and {key} lies in it"
