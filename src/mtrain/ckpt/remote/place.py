"""A place in an object store that holds the checkpoints of a run, or one checkpoint. Needs no
torch.

Under a run's address lie `step_00000100/` and so on, with the files that the folder of a
checkpoint has, `owner.json`, which names the run that writes there, and its tokenizer. A manifest
is created last, and only if there is none: a checkpoint without it is a partial upload, which no
reader takes. Deletions remove it first.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtrain import object_store, strict_json
from mtrain.ckpt import folder, sources
from mtrain.ckpt.folder import MANIFEST
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, MtrainError

OWNER = "owner.json"
TOKENIZER = "tokenizer.json"
"""The object with the tokenizer of a run, for whoever generates text from a checkpoint there."""
STEP = re.compile(r"step_\d{8,}")
MAX_OWNER_BYTES = 1 << 16


@dataclass(frozen=True)
class Remote:
    """A checkpoint as the listing of its store shows it."""

    name: str
    sizes: Mapping[str, int]
    """File -> bytes."""

    @property
    def step(self) -> int:
        """Return its step."""
        return folder.step_of(Path(self.name))

    @property
    def is_committed(self) -> bool:
        """Return whether its manifest is there."""
        return MANIFEST in self.sizes

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return sum(self.sizes.values())


class Place:
    """An address in an object store, such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        """Open it; nothing is sent.

        Raises:
            ConfigError: the address holds credentials, or names no bucket.
            BadEnvironment: the library for the store is not installed.
        """
        self._files = sources.files_at(url)
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Place:
        inner = Place.__new__(Place)
        inner.url = f"{self.url}/{name}"
        inner._files = self._files
        return inner

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the address has the name of a checkpoint, not of a run."""
        return STEP.fullmatch(self.name) is not None

    def sizes(self) -> dict[str, int]:
        """Return the objects below the address, relative path -> bytes; none where it is missing.

        Raises:
            BadEnvironment: the store does not answer, or refuses.
        """
        return sources.listed(self._files, self.url)

    def checkpoints(self) -> list[Remote]:
        """Return the checkpoints below the address by step, those without a manifest too."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.sizes().items():
            name, _, file = path.partition("/")
            if STEP.fullmatch(name) and file:
                found.setdefault(name, {})[file] = size
        return sorted((Remote(*one) for one in found.items()), key=lambda one: one.step)

    def committed(self) -> list[Remote]:
        """Return the checkpoints that have their manifest, by step."""
        return [one for one in self.checkpoints() if one.is_committed]

    def newest(self) -> Place | None:
        """Return the newest checkpoint of a run's address, or of a checkpoint's own; or None."""
        if self.is_checkpoint:
            return self if MANIFEST in self.sizes() else None
        every = self.committed()
        return self / every[-1].name if every else None

    def size_of(self, name: str) -> int | None:
        """Return the bytes of an object; None if it is missing."""
        path = f"{self.url}/{name}"
        try:
            info = object_store.request(lambda: self._files.info(path), path)
        except FileNotFoundError:
            return None
        return int(info.get("size") or 0)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object, or those of a range.

        Raises:
            CorruptData: it is missing.
        """
        path = f"{self.url}/{name}"
        try:
            return bytes(
                object_store.request(lambda: self._files.cat_file(path, start=start, end=end), path)
            )
        except FileNotFoundError:
            raise CorruptData(f"{path} is missing") from None

    def fetch(self, name: str, target: Path) -> None:
        """Download an object to a file.

        Raises:
            CorruptData: it is missing.
            OSError: the disk refuses.
        """
        path = f"{self.url}/{name}"
        # Created here: an error of the disk is not one of the store.
        target.touch()
        try:
            object_store.request(lambda: self._files.get_file(path, str(target)), path)
        except FileNotFoundError:
            raise CorruptData(f"{path} is missing") from None

    def send(self, source: Path, name: str) -> None:
        """Upload a file.

        Raises:
            BadEnvironment: the store refuses, or holds another number of bytes afterwards.
        """
        path = f"{self.url}/{name}"
        with _in_bucket(path):
            object_store.request(lambda: self._files.put_file(str(source), path), path, "written")
        size = source.stat().st_size
        if (there := self.size_of(name)) != size:
            raise BadEnvironment(
                f"{path} has {there or 0} bytes after its upload, {size} were sent"
            )

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists; return False if it does.

        Of several processes that try at the same time, one succeeds.
        """
        path = f"{self.url}/{name}"
        try:
            with _in_bucket(path):
                object_store.request(
                    lambda: self._files.pipe_file(path, data, mode="create"), path, "written"
                )
        except FileExistsError:
            return False
        return True

    def write(self, name: str, data: bytes) -> None:
        """Write an object, whether it exists or not."""
        path = f"{self.url}/{name}"
        with _in_bucket(path):
            object_store.request(lambda: self._files.pipe_file(path, data), path, "written")

    def owner(self) -> dict[str, Any]:
        """Return the facts of the run that writes to this address; empty if none does."""
        try:
            found = json.loads(self.read(OWNER, 0, MAX_OWNER_BYTES))
        except (ValueError, RecursionError, CorruptData):
            return {}
        return found if isinstance(found, dict) else {}

    def remove(self, names: list[str]) -> None:
        """Delete objects, the manifest first; missing ones are no error."""
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
            path = f"{self.url}/{name}"
            with suppress(FileNotFoundError):
                object_store.request(partial(self._files.rm_file, path), path, "deleted")

    def claim(self, owner: Mapping[str, str], *, take_over: bool = False) -> None:
        """Note the run that writes to this address, unless another one does.

        Args:
            owner: describes the run; `id` tells it from others.
            take_over: this run continues the one that wrote here.

        Raises:
            ConfigError: another run writes here.
            BadEnvironment: the store refuses, or there is no such bucket.
        """
        data = strict_json.dumps(dict(owner)).encode()
        if self.create(OWNER, data):
            return
        holder = self.owner()
        if holder.get("id") == owner["id"]:
            return
        if take_over:
            self.remove([OWNER])
            if self.create(OWNER, data):
                return
        who = holder.get("run", "another run")
        where = f" of {holder['host']}" if "host" in holder else ""
        why = f"{who}{where} writes its checkpoints there"
        raise ConfigError.of("MT501", "", None, why, "another address", self.url)


@contextmanager
def _in_bucket(path: str) -> Iterator[None]:
    """Take a missing file of a request that writes as a missing bucket."""
    try:
        yield
    except FileNotFoundError:
        raise BadEnvironment(
            f"{path} cannot be written: there is no such bucket",
            "  fix: create it, or name another one",
        ) from None


def manifest_of(place: Place) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without a look at the files that it names.

    Raises:
        CorruptData: there is none, or it was cut or altered.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            place.fetch(MANIFEST, Path(scratch) / MANIFEST)
        except CorruptData:
            raise uncommitted(place) from None
        try:
            manifest = folder.parse_manifest(Path(scratch))
        except MtrainError as error:
            raise type(error)(*str(error).replace(scratch, place.url).split("\n")) from None
    # Each file may match a manifest that was exchanged for another step's.
    if place.is_checkpoint and manifest["step"] != folder.step_of(Path(place.name)):
        raise CorruptData(f"{place / MANIFEST} is of step {manifest['step']}")
    return manifest


def uncommitted(place: Place) -> CorruptData:
    """Return the error of a checkpoint without a manifest."""
    return CorruptData(f"{place} is not a committed checkpoint: it has no {MANIFEST}")
