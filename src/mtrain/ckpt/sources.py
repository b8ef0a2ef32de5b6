"""The bytes of a checkpoint's shards: of a file on a disk, or of an object, read by ranges.

A checkpoint in an object store is read where it is. A folder stands for it: it has the manifest,
the configuration and the index, compared with their hashes, and `address.json` in place of the
shards. Whoever reads a shard that is not in its folder reads it from that address, only the blocks
that are needed. Needs no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mtrain import durable, object_store, strict_json
from mtrain.ckpt.reading import READ_BYTES, read_at
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from mtrain.object_store import unusable, without_secret
from mtrain.processes import RETRY_S
from mtrain.world.heartbeat import tick

ADDRESS = "address.json"
"""The file of a folder that stands for a checkpoint in an object store."""
MAX_ADDRESS_BYTES = 1 << 16
TRIES = 4
"""Tries to get a range, 1, 2 and 4 seconds apart."""

Identity = tuple[int | str, ...]
"""A file as long as nobody writes to it, also under another name; or one version of an object."""


def note(folder: Path, url: str, home: Path) -> None:
    """Make `folder` stand for the checkpoint at an address, once it has the path `home`."""
    body = {"address": url, "home": os.path.realpath(home)}
    durable.write(folder / ADDRESS, strict_json.dumps(body).encode())


def address_of(root: Path) -> str | None:
    """Return the address of the checkpoint that a folder stands for; None: it stands for none.

    Raises:
        CorruptData: the file that names the address cannot be read, or was made for another folder
            and so may be somebody else's: whoever wrote it would receive requests.
    """
    path = root / ADDRESS
    try:
        with path.open("rb") as file:
            # Of a folder that was received, the file may be anything, of any length.
            body = json.loads(file.read(MAX_ADDRESS_BYTES))
            url = body["address"]
            home = body["home"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise durable.not_read(path, error) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CorruptData(f"{path} names no address of a checkpoint") from None
    if not isinstance(url, str) or unusable(url):
        raise CorruptData(f"{path} names no address of a checkpoint")
    if home != os.path.realpath(root):
        raise CorruptData(f"{path} was made for another folder; resume from {url} again")
    return url


def sizes_at(url: str) -> dict[str, int]:
    """Return the objects of a checkpoint at an address, name -> bytes; none where it is missing.

    Raises:
        BadEnvironment: the store does not answer, or refuses.
    """
    return listed(files_at(url), url)


def listed(files: Any, url: str) -> dict[str, int]:
    """Return the objects below an address, relative path -> bytes; see `sizes_at`."""
    root = files._strip_protocol(url).rstrip("/")
    try:
        found = object_store.request(lambda: files.find(url, detail=True), url, "listed")
    except FileNotFoundError:
        return {}
    return {
        path[len(root) + 1 :]: int(info.get("size") or 0)
        for path, info in found.items()
        if path.startswith(f"{root}/")
    }


def files_at(url: str) -> Any:
    """Return a new file system of an address, with the credentials that are set now.

    Raises:
        ConfigError: the address holds credentials, or names no bucket.
        BadEnvironment: the library for the store is not installed.
    """
    if why := unusable(url):
        fix = "an address such as s3://bucket/prefix"
        raise ConfigError.of("MT459", "", None, why, fix, without_secret(url))
    return _opened(url.partition("://")[0])


def _opened(scheme: str) -> Any:
    # A cached listing would hide objects that another process has written meanwhile.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "file":
        options["auto_mkdir"] = True
    return object_store.file_system(f"{scheme}://", "a checkpoint", **options)


@cache
def _kept(scheme: str, _: int) -> Any:
    """Return the file system that all objects are read from; a process that was forked must not
    use the connections of its parent.
    """
    return _opened(scheme)


class DiskFile:
    """A file on a disk, open for reading; it is opened again by name if it was closed.

    Raises:
        FileNotFoundError: there is none.
        CorruptData, BadEnvironment: it may not be read.
    """

    def __init__(self, path: Path, *, once: bool = False) -> None:
        """Open it; `once`: its bytes are read once, so the page cache need not keep them."""
        self.name = str(path)
        self._path = path
        self._once = once
        self._file: int | None = None
        status = self._open()
        self.nbytes = status.st_size
        self.identity = identity(status)

    @property
    def is_open(self) -> bool:
        """Return true while it holds a descriptor."""
        return self._file is not None

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def read(self, at: int, size: int) -> memoryview:
        """Return bytes in memory of their own.

        Raises:
            CorruptData: it ends before, was replaced, or the disk gives an error.
        """
        # Reopened by name: the file may have been replaced, and its header is of the old one.
        if self._file is None and identity(self._open()) != self.identity:
            raise CorruptData(f"{self.name} was written to while it was read")
        assert self._file is not None
        return read_at(self._path, self._file, at, size, once=self._once)

    def _open(self) -> os.stat_result:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.fstat(self._file)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise durable.not_read(self._path, error) from None


class StoredObject:
    """An object of a store, of which ranges are read; see `DiskFile`.

    Raises:
        CorruptData: it is missing.
        BadEnvironment: the store does not answer, or refuses.
    """

    is_open = False
    """An object holds no descriptor."""

    def __init__(self, url: str) -> None:
        """Ask for its size."""
        self.name = url
        facts = self._asked(lambda files: files.info(url))
        self.nbytes = int(facts.get("size") or 0)
        self.identity: Identity = (url, self.nbytes, _version(facts))

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def read(self, at: int, size: int) -> memoryview:
        """Return bytes in memory of their own.

        Raises:
            CorruptData: it ends before, or is missing.
            BadEnvironment: the store does not answer, or refuses.
        """
        out = memoryview(bytearray(size))
        for start in range(0, size, READ_BYTES):
            stop = min(size, start + READ_BYTES)
            data = self._range(at + start, at + stop)
            # A store shortens a range that reaches beyond the end.
            if len(data) != stop - start:
                raise CorruptData(f"{self.name} is not what was written: it is cut")
            out[start:stop] = data
            tick()
        return out

    def _range(self, start: int, stop: int) -> bytes:
        found = self._asked(lambda files: files.cat_file(self.name, start=start, end=stop))
        return bytes(found)

    def _asked(self, call: Any) -> Any:
        """Return the answer of the store, which may fail for a moment."""
        scheme = self.name.partition("://")[0]
        for attempt in range(TRIES):
            try:
                return object_store.request(lambda: call(_kept(scheme, os.getpid())), self.name)
            except FileNotFoundError:
                raise CorruptData(f"{self.name} is missing") from None
            except BadEnvironment:
                # Credentials may have been renewed.
                _kept.cache_clear()
                if attempt == TRIES - 1:
                    raise
            # Other ranks wait for this one meanwhile: it is alive.
            tick()
            time.sleep(RETRY_S * 2.0**attempt)
        raise AssertionError


def opened(path: Path, *, once: bool = False) -> DiskFile | StoredObject:
    """Open a shard in its folder, or at the address that the folder stands for.

    Raises:
        CorruptData: it is missing.
        BadEnvironment: it may not be read.
    """
    try:
        return DiskFile(path, once=once)
    except FileNotFoundError as error:
        url = address_of(path.parent)
        if url is None:
            raise durable.not_read(path, error) from None
    return StoredObject(f"{url}/{path.name}")


def identity(status: os.stat_result) -> Identity:
    """Return the identity of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _version(facts: Mapping[str, Any]) -> str:
    """Return the version of an object in a store; empty if the store has no versions."""
    names = ("ETag", "etag", "generation", "mtime", "created", "LastModified")
    return next((str(facts[name]) for name in names if facts.get(name)), "")
