"""Checkpoints to an object store and back, compared with their hashes. Needs no torch.

An upload skips objects that exist with the same size and a header of the sha256 that the manifest
names. The header has a hash of every block, so another step's or another
run's file differs there; small files are compared whole. A download compares every byte before
the folder of a checkpoint appears.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtrain import durable
from mtrain.ckpt import folder, hashes, sources
from mtrain.ckpt.folder import MANIFEST, SHARD
from mtrain.ckpt.remote.place import TOKENIZER, Place, Remote, manifest_of
from mtrain.ckpt.retention import Policy, Retention, retention
from mtrain.ckpt.verification import Verified
from mtrain.config.compose.paths import RUN_FILE
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError

AT_ONCE = 4
"""Files that are transferred at a time; a store's library may split each of them further."""


@dataclass
class Sent:
    """The result of an upload."""

    files: int = 0
    """Files that were sent, with the manifest."""
    nbytes: int = 0
    present: int = 0
    """Files that were there."""
    seconds: float = 0.0


def upload(
    source: Path,
    place: Place,
    *,
    replace: bool = False,
    read_back: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> Sent:
    """Upload a committed checkpoint; its manifest is created last.

    Args:
        source: its folder.
        place: its address.
        replace: another checkpoint at the address gives way; its manifest goes first.
        read_back: compare every byte of the store's objects before the manifest is created.
        tick: called before each file.

    Raises:
        ConfigError: another checkpoint is there, or another process has created one meanwhile.
        CorruptData: the folder is no committed checkpoint, or an object differs from the sent one.
        BadEnvironment: the store does not answer, or refuses.
    """
    begun = time.monotonic()
    manifest = folder.read_manifest(source, verify=False)
    marker = (source / MANIFEST).read_bytes()
    sizes = place.sizes()
    if MANIFEST in sizes and place.read(MANIFEST) != marker:
        if not replace:
            raise _taken(place)
        place.remove([MANIFEST])
        del sizes[MANIFEST]
    sent = Sent()

    def send(name: str, facts: Mapping[str, Any]) -> int | None:
        tick()
        there = sizes.get(name) == facts["bytes"] and _is_same(place, name, facts)
        if there and read_back:
            there = not _fault(place, name, facts)
        if there:
            return None
        place.send(source / name, name)
        if read_back and (fault := _fault(place, name, facts)):
            raise CorruptData(fault)
        return int(facts["bytes"])

    files = manifest["files"]
    with _threads() as pool:
        for nbytes in pool.map(send, files, files.values()):
            sent.present += nbytes is None
            sent.files += nbytes is not None
            sent.nbytes += nbytes or 0
    # Left by a partial upload of another layout: a reader would report them.
    place.remove([name for name in sizes if name not in files and name != MANIFEST])
    if MANIFEST in sizes:
        sent.present += 1
    else:
        tick()
        if not place.create(MANIFEST, marker):
            raise _taken(place)
        sent.files += 1
        sent.nbytes += len(marker)
    sent.seconds = time.monotonic() - begun
    return sent


def send_tokenizer(home: Path, place: Place) -> None:
    """Upload the tokenizer of a run to the address of its checkpoints, if it has one that is not
    there.

    Raises:
        BadEnvironment: the store does not answer, or refuses.
    """
    file = home / TOKENIZER
    if file.is_file() and place.size_of(TOKENIZER) != file.stat().st_size:
        place.send(file, TOKENIZER)


def _taken(place: Place) -> ConfigError:
    why = "another checkpoint is there"
    return ConfigError.of("MT507", "", None, why, "another address", place.url)


def _is_same(place: Place, name: str, facts: Mapping[str, Any]) -> bool:
    """Return whether an object of the right size is the file that a manifest describes."""
    if not name.endswith(SHARD):
        return hashes.hash_bytes(place.read(name)) == str(facts["sha256"])
    # A shard of the first format has no hash in its header.
    if "header_sha256" not in facts:
        return False
    length = place.read(name, 0, hashes.LENGTH_BYTES)
    end = hashes.LENGTH_BYTES + int.from_bytes(length, "little")
    if end > facts["bytes"]:
        return False
    header = place.read(name, hashes.LENGTH_BYTES, end)
    return hashes.hash_bytes(length + header) == str(facts["header_sha256"])


def download(place: Place, out: Path) -> int:
    """Download a checkpoint to a folder that appears once every byte has been compared; return the
    number of bytes.

    Raises:
        CorruptData: there is no committed checkpoint, or an object is damaged.
        BadEnvironment: the store does not answer, or the disk refuses.
    """
    draft = out.with_name(f".saving-{out.name}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        nbytes = download_into(place, draft)
        durable.sync(draft)
        draft.rename(out)
        durable.sync(out.parent)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadEnvironment(f"{out} cannot be written: {why}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return nbytes


def download_into(place: Place, draft: Path) -> int:
    """Download the files of a checkpoint into a folder, unless an earlier download has left them
    there whole; every byte has been compared when it returns. See `download`.

    Raises:
        OSError: the disk refuses.
    """
    manifest = manifest_of(place)
    files = manifest["files"]
    _check_names(place, files)

    def take(name: str, facts: Mapping[str, Any]) -> int:
        if not _is_whole(draft / name, facts):
            place.fetch(name, draft / name)
            _compare(place, draft / name, name, facts)
        durable.sync(draft / name)
        return int(facts["bytes"])

    for file in [path for path in draft.iterdir() if path.name not in files]:
        file.unlink()
    with _threads() as pool:
        nbytes = sum(pool.map(take, files, files.values()))
    # Last, as in a commit.
    place.fetch(MANIFEST, draft / MANIFEST)
    if folder.parse_manifest(draft) != manifest:
        raise CorruptData(f"{place} was replaced while it was read")
    durable.sync(draft / MANIFEST)
    return nbytes


def referred(place: Place, draft: Path, final: Path | None = None) -> None:
    """Make an empty folder stand for a checkpoint, whose shards are read where they are; it will
    get the path `final`, None: it keeps its own.

    Raises:
        CorruptData: there is no committed checkpoint, or an object differs.
        BadEnvironment: the store does not answer, or the disk refuses.
    """
    manifest = described(place, draft)
    sources.note(draft, place.url, final or draft)
    # Last, as in a commit.
    place.fetch(MANIFEST, draft / MANIFEST)
    if folder.parse_manifest(draft) != manifest:
        raise CorruptData(f"{place} was replaced while it was read")
    durable.sync(draft / MANIFEST)
    durable.sync(draft)


def described(place: Place, scratch: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after comparing the sizes of all objects; copy its
    configuration and its index to the folder `scratch`.

    Raises:
        CorruptData: there is no committed checkpoint, or an object differs.
    """
    manifest = manifest_of(place)
    files = manifest["files"]
    _check_names(place, files)
    if faults := list(faults_of(place, manifest, place.sizes())):
        raise CorruptData(*faults)
    for name, facts in files.items():
        if not name.endswith(SHARD):
            place.fetch(name, scratch / name)
            _compare(place, scratch / name, name, facts)
    return manifest


def faults_of(place: Place, manifest: dict[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each object that is missing or has another size than the manifest names."""
    for name, facts in manifest["files"].items():
        if name not in sizes:
            yield f"{place / name} is missing"
        elif sizes[name] != facts["bytes"]:
            yield f"{place / name} has {sizes[name]} bytes, {facts['bytes']} were written"


def strangers(manifest: dict[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Return the names of objects that do not belong to a checkpoint."""
    return sorted(name for name in sizes if name not in (*manifest["files"], MANIFEST))


def verified(place: Place) -> Verified:
    """Read every byte of a checkpoint and compare it with the hashes; a few files at a time are on
    the local disk meanwhile.

    Raises:
        CorruptData: it has no manifest that can be read.
        BadEnvironment: the store does not answer.
    """
    begun = time.monotonic()
    manifest = manifest_of(place)
    files = manifest["files"]
    _check_names(place, files)

    with _threads() as pool:
        faults = list(pool.map(partial(_fault, place), files, files.values()))
    damage = [fault for fault in faults if fault]
    damage += [
        f"{place / name} does not belong to the checkpoint"
        for name in strangers(manifest, place.sizes())
    ]
    whole = [name for name, fault in zip(files, faults, strict=True) if not fault]
    nbytes = sum(files[name]["bytes"] for name in whole)
    return Verified(len(files), nbytes, time.monotonic() - begun, tuple(damage))


def pruned(place: Place, policy: Policy, losses: Mapping[int, float]) -> Retention:
    """Delete the checkpoints of a run's address that `checkpoint.keep` and its like do not keep,
    and those that were never completed; return the fate of all.

    Raises:
        BadEnvironment: the store refuses.
    """
    every = place.checkpoints()
    fate = fate_of(every, policy, losses)
    newest = max((one.step for one in every if one.is_committed), default=0)
    gone = {path.name for path in fate.doomed}
    for one in every:
        partial_upload = not one.is_committed and one.step < newest
        if one.name in gone or partial_upload:
            (place / one.name).remove(list(one.sizes))
    return fate


def fate_of(every: list[Remote], policy: Policy, losses: Mapping[int, float]) -> Retention:
    """Return which of the checkpoints of a run's address are deleted."""
    whole = [Path(one.name) for one in every if one.is_committed]
    return retention(whole, policy, complete=whole[-1:], losses=losses)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="transfer")


@contextmanager
def _fetched(place: Place, name: str) -> Iterator[Path]:
    """Yield a temporary copy of an object."""
    with tempfile.TemporaryDirectory(prefix="mtrain-") as scratch:
        file = Path(scratch) / name
        try:
            place.fetch(name, file)
        except OSError as error:
            raise BadEnvironment(f"{file} cannot be written: {error.strerror or error}") from None
        yield file


def _fault(place: Place, name: str, facts: Mapping[str, Any]) -> str:
    """Read all bytes of an object; return its difference from the manifest in words, or ""."""
    try:
        with _fetched(place, name) as file:
            _compare(place, file, name, facts)
    except CorruptData as error:
        return str(error)
    except (KeyError, TypeError):
        return f"{place / name}: the manifest has no hash of it"
    return ""


def _is_whole(file: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether a file is there, every byte of it as a manifest describes."""
    if not file.is_file():
        return False
    hashes.forget(file)
    try:
        folder.check_file(file.parent, file.name, dict(facts), verify=True)
    except MtrainError:
        return False
    return True


def _compare(place: Place, file: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Compare a downloaded file with the manifest, every byte of it.

    Raises:
        CorruptData: it differs.
    """
    hashes.forget(file)
    try:
        folder.check_file(file.parent, name, dict(facts), verify=True)
    except MtrainError as error:
        shown = str(error).replace(str(file.parent), place.url)
        raise type(error)(*shown.split("\n")) from None


def _check_names(place: Place, files: Mapping[str, Any]) -> None:
    """Refuse a manifest whose names would lead out of a folder."""
    for name in files:
        if Path(name).name != name or "\0" in name or name == MANIFEST:
            raise CorruptData(f"{place / MANIFEST}: {name!r} is no plain file name")
    if RUN_FILE not in files:
        raise CorruptData(f"{place / MANIFEST} has no {RUN_FILE}")
