"""The folder of a checkpoint: names, manifest, commit by rename, and the checks of every file.

Needs no torch.

A checkpoint is a folder `step_00000100` that appears by one rename after everything in it is on
disk:

    manifest.json             tensors and their pieces, sizes and hashes of the files, and the
                              trainer's state
    index_00000.json          the pieces of 64 ranks, where a checkpoint has more than 256
    run.yaml                  the configuration that made it
    rank_00000.safetensors    the pieces that rank 0 saved, with a hash of every block of each
    frozen_00000.safetensors  pieces that no step changes, when adapters are trained: a link to the
                              file of the previous checkpoint, so that the disk holds it once

Tensors are named `model/<key>`, `optim/<state>/<key>`, of a frozen reference model
`reference/<key>`, and of a critic `critic/model/<key>` and `critic/optim/<state>/<key>`. In format
3 the hash of a block was sha256. In format 2 each piece had one hash. In format 1 each file had
one, a weight was named by its bare key, and a state by its own name, a dot and the key. All are
still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mtrain import durable, locks, strict_json
from mtrain.ckpt import hashes, sources
from mtrain.config.compose.paths import MANIFEST, RUN_FILE
from mtrain.errors import CorruptData

T = TypeVar("T")
FORMAT = 4
READ = (1, 2, 3, 4)
STATES_OF_FORMAT_1 = ("exp_avg.", "exp_avg_sq.", "main_weight.", "momentum_buffer.")
MODEL = "model/"
TEACHER = "teacher"
"""Fact of a manifest: the hash of the teacher that the run learns from."""
SAMPLED = "sampled_with"
"""Fact of a manifest: the step whose weights sample the answers of the next step."""
CRITIC = "critic/"
"""Prefix of the names of a critic's tensors, before those that they have in a run of its own; and,
without the stroke, the fact of a manifest with its counters.
"""
REFERENCE = "reference/"
"""Prefix of the names of the model's own tensors."""
STREAMS = "by stage, data and context rank"
"""Marker in a checkpoint for the ranks with distinct random generators; without it (older
checkpoints) all ranks had the same.
"""
MAX_MANIFEST_BYTES = 1 << 30
ASKED_S = 1.0
"""The longest that a process which deletes checkpoints locks a manifest."""
PAUSE_S = 0.01
FEW_FILES = 256
"""Files whose sizes are compared one after the other."""
LOOKS = 16
"""Files whose sizes are compared at a time, where there are more."""
FETCHING = ".fetching-"
"""The beginning of the name of a folder that will stand for a checkpoint of an object store."""
SHARD = ".safetensors"
PARTS = {"step": int, "state": dict, "tensors": dict, "files": dict}
"""The parts of a manifest of every format, with their types."""


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint after `step` updates."""
    return f"step_{step:08d}"


def by_file(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items of each file, in their order: as many as fit into `limit` bytes, at least
    one.
    """
    held: list[T] = []
    size = 0
    for item in items:
        need = nbytes(item)
        if held and size + need > limit:
            yield held
            held = []
            size = 0
        held.append(item)
        size += need
    yield held


def draft_of(root: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is committed."""
    return root / f".saving-{folder_name(step)}"


def shard_name(rank: int) -> str:
    """Return the name of the file of a rank's pieces."""
    return f"rank_{rank:05d}.safetensors"


def frozen_name(rank: int) -> str:
    """Return the name of the file of a rank's pieces that no step changes."""
    return f"frozen_{rank:05d}.safetensors"


def commit(draft: Path, final: Path, body: dict[str, Any]) -> None:
    """Write the manifest of a complete draft and give the folder its name."""
    run_file = draft / RUN_FILE
    body["files"][RUN_FILE] = {
        "bytes": run_file.stat().st_size,
        "sha256": hashes.hash_file(run_file),
    }
    # The hash covers everything but itself: a manifest that was cut or edited does not match.
    body = {"format": FORMAT, **body}
    write_json(draft / MANIFEST, body | {"sha256": digest(body)})
    # A rename may reach the disk before the files in the folder: they have to be there first.
    durable.sync(draft)
    if final.exists():
        # The same step again, after a resume from an older checkpoint: the new one takes its place.
        old = final.with_name(f".replaced-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        draft.rename(final)
        durable.sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    else:
        draft.rename(final)
        durable.sync(final.parent)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder holds a committed checkpoint."""
    return (path / MANIFEST).is_file()


def folders(root: Path) -> list[Path]:
    """Return folders with the name of a checkpoint, by step; some may lack their manifest."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if re.fullmatch(r"step_\d{8,}", p.name)), key=step_of)


def committed(root: Path) -> list[Path]:
    """Return the committed checkpoints in a folder, oldest first; half-written ones are not among
    them.
    """
    return [path for path in folders(root) if (path / MANIFEST).is_file()]


def sweep(root: Path) -> None:
    """Remove leftovers of interrupted saves and deletions, and restore the checkpoint that an
    interrupted replacement moved away.
    """
    for path in root.glob(".replaced-step_*"):
        final = path.with_name(path.name.removeprefix(".replaced-"))
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            # killed between the two renames of `commit`: the older one is all that there is
            path.rename(final)
    for path in [p for name in (".saving-", ".deleted-", FETCHING) for p in root.glob(f"{name}*")]:
        shutil.rmtree(path, ignore_errors=True)


def hidden(path: Path) -> Path | None:
    """Rename a checkpoint that is to be deleted, so that an interrupted deletion is not taken for a
    checkpoint; return its new path, or None if a process reads it.
    """
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return path.rename(path.with_name(f".deleted-{path.name}"))
    try:
        # Nobody can begin to read it between this question and the rename.
        if not locks.seize(descriptor):
            return None
        return path.rename(path.with_name(f".deleted-{path.name}"))
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Mark a checkpoint as read, so that no process deletes it meanwhile.

    Nothing is marked in a folder that this user may not read, or on a disk without locks.
    """
    descriptor = None
    with suppress(OSError):
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if descriptor is not None:
            with suppress(OSError):
                _share(descriptor, path / MANIFEST)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _share(descriptor: int, manifest: Path) -> None:
    """Lock an open manifest with other readers, after a process that asks whether it is read, or
    that deletes it.
    """
    for _ in range(round(ASKED_S / PAUSE_S)):
        try:
            locks.share(descriptor, manifest)
            return
        except locks.Taken:
            time.sleep(PAUSE_S)


def is_read(path: Path) -> bool:
    """Return whether a process has marked a checkpoint as read."""
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return locks.is_shared(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path, *, verify: bool) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose files are all there in their sizes and whose
    `run.yaml` has its hash.

    With `verify`, every byte of every file has been compared with its hash. Without, readers of
    a shard compare the blocks that they read (`hashes`).

    Raises:
        CorruptData: no manifest, one that is cut or altered, or a file that is missing or altered,
            by name.
        BadEnvironment: a file may not be read.
    """
    manifest = parse_manifest(path)
    files = manifest["files"]
    there = objects_of(path)
    if verify or len(files) <= FEW_FILES:
        for name, facts in files.items():
            check_file(path, name, facts, verify=verify, there=there)
        return manifest
    # A network disk takes milliseconds for each.
    with ThreadPoolExecutor(LOOKS) as pool:
        look = partial(check_file, path, verify=False, there=there)
        for _ in pool.map(look, files, files.values()):
            pass
    return manifest


def parse_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without a look at the files that it names.

    Raises:
        CorruptData: no manifest, one that is cut, altered, or of a format that is not read here.
        BadEnvironment: it may not be read.
    """
    file = path / MANIFEST
    try:
        # Before it is read: a pipe would block, and a file of any size be parsed in memory.
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptData(f"{file} is no file")
        if status.st_size > MAX_MANIFEST_BYTES:
            raise CorruptData(f"{file}: larger than a manifest can be")
        manifest = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        # `from None`: the cause is the sentence, not the system's error
        raise CorruptData(f"{path} is not a committed checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise durable.not_read(file, error) from None
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{file} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") not in READ:
        raise CorruptData(f"{file}: {_unread(manifest)}")
    if manifest.get("sha256") != digest({k: v for k, v in manifest.items() if k != "sha256"}):
        raise CorruptData(f"{file}: its content does not match its own hash; it was altered or cut")
    lacking = [key for key, kind in PARTS.items() if not isinstance(manifest.get(key), kind)]
    if lacking:
        raise CorruptData(f"{file}: not a manifest, since it lacks {', '.join(lacking)}")
    if manifest["format"] == 1:
        manifest["tensors"] = {
            name_of_format_1(key): entry for key, entry in manifest["tensors"].items()
        }
    return manifest


def _unread(manifest: Any) -> str:
    """Return why a manifest is of no format that is read here."""
    number = manifest.get("format") if isinstance(manifest, dict) else None
    known = f"not a manifest of format {', '.join(map(str, READ))}"
    if isinstance(number, int) and number > max(READ):
        return f"{known}, but of {number}; the version of mtrain that wrote it reads it"
    return known


def name_of_format_1(key: str) -> str:
    """Return the name of a tensor that format 1 calls `key`."""
    state = next((state for state in STATES_OF_FORMAT_1 if key.startswith(state)), "")
    return f"optim/{state[:-1]}/{key.removeprefix(state)}" if state else MODEL + key


@dataclass(frozen=True)
class Objects:
    """The objects of a checkpoint for which a folder stands."""

    url: str
    sizes: Mapping[str, int]
    """Name -> bytes."""


def objects_of(root: Path) -> Objects | None:
    """Return the objects that a folder stands for; None: it has its shards itself.

    Raises:
        CorruptData: the file that names the address cannot be read.
        BadEnvironment: the store does not answer, or refuses.
    """
    url = sources.address_of(root)
    return None if url is None else Objects(url, sources.sizes_at(url))


def check_file(
    root: Path,
    name: str,
    facts: dict[str, Any],
    *,
    verify: bool,
    there: Objects | None = None,
) -> None:
    """Compare a file of a checkpoint with the manifest: its size, and its hash unless it is a
    shard; with `verify`, every byte of a shard too. `there`: see `objects_of`.

    Raises:
        CorruptData: it is missing, altered, or outside of the folder.
        BadEnvironment: it may not be read.
    """
    path = root / name
    check_name(root, name)
    is_shard = name.endswith(SHARD)
    shown = f"{there.url}/{name}" if there is not None and is_shard else str(path)
    size = there.sizes.get(name) if there is not None and is_shard else _size_of(path)
    if size is None:
        raise CorruptData(f"{shown} is missing")
    if size != facts["bytes"]:
        raise CorruptData(f"{shown} has {size} bytes, {facts['bytes']} were written")
    # A shard has hashes of its own blocks, which its readers compare; other files are small.
    if not is_shard:
        hashes.check_file(path, facts["sha256"])
    elif verify:
        shard = hashes.checked(path, facts)
        try:
            shard.check()
        finally:
            shard.close()


def _size_of(path: Path) -> int | None:
    """Return the bytes of a file; None if it is missing.

    Raises:
        CorruptData: it is no file.
        BadEnvironment: it may not be read.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise durable.not_read(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptData(f"{path} is no file")
    return status.st_size


def check_name(root: Path, name: str) -> None:
    """Refuse the name of a file of a checkpoint that would lead out of its folder.

    Raises:
        CorruptData: the name is not plain.
    """
    # A manifest is data from elsewhere.
    if Path(name).name != name or "\0" in name or name in ("..", MANIFEST):
        raise CorruptData(f"{root / MANIFEST}: {name!r} is no plain file name")


def digest(body: dict[str, Any]) -> str:
    """Return hex sha256 of the canonical JSON of `body`."""
    return hashlib.sha256(
        strict_json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write `body` as JSON and wait until it is on disk."""
    durable.write(path, strict_json.dumps(body, separators=(",", ":")).encode())
