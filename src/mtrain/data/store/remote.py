"""Corpora in object stores (`s3://`, `gs://`, `hf://`) through fsspec.

A corpus becomes a folder of `data.cache_dir` with its `.idx`, its manifest if it has one, and a
small file with the address of the `.bin`. Blocks of tokens are fetched on demand and cached next to
it, for all corpora up to `data.remote_cache_gib`, with the least recently used removed first. The
ranks of a machine share them. The store's library finds the credentials; they never appear in a
path or a message.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mtrain import object_store, strict_json, units
from mtrain.config.disk import token_files
from mtrain.config.disk.token_files import HEADER, read_header
from mtrain.data.store import cache as corpora
from mtrain.errors import ConfigError, CorruptData
from mtrain.object_store import has_secret, without_secret

SUFFIX = ".remote.json"
FOLDER = "remote"
BLOCK_BYTES = 1 << 20
# Blocks that a process keeps in memory
HELD_BLOCKS = 64
# Fetched blocks after which a process measures the cache; others may fetch as many meanwhile
COUNTED_EVERY = 16
T = TypeVar("T")


def is_mirrored(prefix: Path) -> bool:
    """Return whether a prefix is the local folder of a remote corpus."""
    return prefix.with_name(prefix.name + SUFFIX).is_file()


def mirrored(name: str, key: str, cache: Path, limit_bytes: int) -> Path:
    """Return the prefix of the local folder in `cache` for a remote corpus.

    Raises ConfigError for a name with credentials or without files, BadEnvironment if the store or
    its library is not available, CorruptData for an index that does not add up.
    """
    # the prefix is written to run.yaml, logs and the cache's notes
    if has_secret(name):
        rule = "cannot be used because it holds credentials or a query, and logs show paths"
        fix = "a path without them: the store's library finds credentials in the environment"
        raise ConfigError.of("MT602", f"data.{key}", without_secret(name), rule, fix)
    store = Store(name)
    # sizes and versions name the folder: a replaced file is another corpus, with no old blocks
    facts = {suffix: store.facts(suffix, key) for suffix in (".idx", ".bin")}
    facts |= store.manifest_facts()
    digest = hashlib.sha256(strict_json.dumps([name, facts]).encode()).hexdigest()[:16]
    folder = (
        cache / FOLDER / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name.rpartition('/')[2])[:80]}-{digest}"
    )
    prefix = folder / "tokens"
    with corpora.writing(cache):
        (cache / FOLDER).mkdir(parents=True, exist_ok=True)
        with corpora.locked(folder.with_name(f"{folder.name}.lock")):
            if not (folder / f"tokens{SUFFIX}").exists():
                _fetch_index(store, folder, facts, limit_bytes)
            _note(folder, {"name": name, "bytes": facts[".bin"]["bytes"], "limit": limit_bytes})
    return prefix


def _note(folder: Path, address: dict[str, Any]) -> None:
    """Write the address of the tokens next to the index, if it changed."""
    path = folder / f"tokens{SUFFIX}"
    text = strict_json.dumps(address) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        draft = folder / f".note-{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)


def _fetch_index(
    store: Store, folder: Path, facts: dict[str, dict[str, Any]], limit_bytes: int
) -> None:
    """Fetch the index of a corpus, and its manifest, into a folder."""
    size = facts[".idx"]["bytes"]
    idx = Path(f"{store.name}.idx")
    shown = f"{store.name}.idx"
    if size > limit_bytes:
        rule = (
            f"cannot hold {shown} because that has {units.bytes_(size)}, and the cache takes"
            f" {units.bytes_(limit_bytes)}"
        )
        fix = "a larger data.remote_cache_gib"
        raise ConfigError.of("MT602", "data.remote_cache_gib", None, rule, fix)
    # the header first: gigabytes are fetched only for a file that is an index
    try:
        read_header(idx, store.bytes_of(".idx", 0, min(size, HEADER.size)), size)
    except CorruptData as error:
        raise CorruptData(str(error).replace(str(idx), shown)) from None
    (folder / "blocks").mkdir(parents=True, exist_ok=True)
    draft = folder / f".tokens.idx-{os.getpid()}"
    with open(draft, "wb") as file:
        for start in range(0, size, 64 * BLOCK_BYTES):
            file.write(store.bytes_of(".idx", start, min(size, start + 64 * BLOCK_BYTES)))
    draft.replace(folder / "tokens.idx")
    manifest_facts = facts.get(token_files.SUFFIX)
    if manifest_facts is not None:
        size = manifest_facts["bytes"]
        if size > token_files.MAX_BYTES:
            raise CorruptData(
                f"{store.name}{token_files.SUFFIX}: {units.bytes_(size)}; a manifest may have"
                f" {units.bytes_(token_files.MAX_BYTES)}"
            )
        draft.write_bytes(store.bytes_of(token_files.SUFFIX, 0, size))
        draft.replace(token_files.path_of(folder / "tokens"))


class Store:
    """The two files of a corpus in an object store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._of_process: tuple[int, Any] | None = None

    @property
    def files(self) -> Any:
        """Return the file system, a new one in each process, as some do not survive a fork."""
        if self._of_process is None or self._of_process[0] != os.getpid():
            self._of_process = os.getpid(), object_store.file_system(self.name, "data")
        return self._of_process[1]

    def facts(self, suffix: str, key: str) -> dict[str, Any]:
        """Return the size of a file and its version in the store.

        Raises ConfigError if the file is missing.
        """
        path = self.name + suffix
        try:
            info = self._request(lambda: self.files.info(path), path)
        except FileNotFoundError:
            rule = f"no file {path.rpartition('/')[2]} there"
            raise ConfigError.of("MT602", f"data.{key}", self.name, rule, "another path") from None
        version = next(
            (str(info[k]) for k in ("ETag", "etag", "blob_id", "md5Hash", "mtime") if info.get(k)),
            "",
        )
        return {"bytes": int(info.get("size") or 0), "version": version}

    def manifest_facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of the manifest by its suffix, or {} if the corpus has no manifest."""

        def exists() -> bool:
            try:
                return bool(self.files.info(self.name + token_files.SUFFIX))
            except (FileNotFoundError, PermissionError):
                # without the right to list files, a store denies access to missing ones
                return False

        if not self._request(exists, self.name + token_files.SUFFIX):
            return {}
        return {token_files.SUFFIX: self.facts(token_files.SUFFIX, "path")}

    def bytes_of(self, suffix: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to `end`.

        Raises BadEnvironment if they cannot be read.
        """
        path = self.name + suffix
        data: bytes = self._request(lambda: self.files.cat_file(path, start=start, end=end), path)
        return self._whole(data, path, start, end)

    def pieces(self, suffix: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of a file, fetched in parallel if the store can do that."""
        path = self.name + suffix
        starts = [start for start, _ in ranges]
        ends = [end for _, end in ranges]
        found = self._request(
            lambda: self.files.cat_ranges([path] * len(ranges), starts, ends, on_error="raise"),
            path,
        )
        return [self._whole(data, path, *each) for data, each in zip(found, ranges, strict=True)]

    def _whole(self, data: Any, path: str, start: int, end: int) -> bytes:
        if not isinstance(data, bytes) or len(data) != end - start:
            held = len(data) if isinstance(data, bytes) else 0
            raise CorruptData(
                f"{path}: offset {start}: {held} bytes came for {end - start}; was it replaced?"
            )
        return data

    def _request(self, call: Callable[[], T], path: str) -> T:
        return object_store.request(call, path)


class RemoteTokens:
    """The tokens of a remote corpus, indexed like an array by a place, a slice or an array.

    Raises BadEnvironment if a block cannot be fetched.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        address = json.loads(prefix.with_name(prefix.name + SUFFIX).read_text(encoding="utf-8"))
        self.dtype = dtype
        self.nbytes = int(address["bytes"])
        self.limit_bytes = int(address["limit"])
        self.store = Store(address["name"])
        self.folder = prefix.parent / "blocks"
        self._block = functools.lru_cache(maxsize=HELD_BLOCKS)(self._from_disk)
        # so large that the first fetch measures the cache, which earlier runs may have filled
        self._fetched = 1 << 30

    def __len__(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            assert step == 1
            return self._span(start, max(start, stop))
        wanted = np.asarray(places, np.int64)
        flat = wanted.ravel()
        out = np.empty(len(flat), self.dtype)
        blocks, within = np.divmod(flat * self.dtype.itemsize, BLOCK_BYTES)
        self._have(np.unique(blocks).tolist())
        for block in np.unique(blocks):
            rows = blocks == block
            out[rows] = self._block(int(block))[within[rows] // self.dtype.itemsize]
        return out.reshape(wanted.shape) if wanted.ndim else out[0]

    def pieces(self, starts: list[int], length: int) -> list[np.ndarray]:
        """Return `length` tokens from each of some places, without the blocks around them."""
        size = self.dtype.itemsize
        ranges = [(start * size, min(start + length, len(self)) * size) for start in starts]
        return [np.frombuffer(data, self.dtype) for data in self.store.pieces(".bin", ranges)]

    def expect(self, starts: np.ndarray, length: int) -> None:
        """Fetch the blocks that hold these spans, in parallel."""
        size = self.dtype.itemsize
        first = starts * size // BLOCK_BYTES
        last = (starts + length - 1) * size // BLOCK_BYTES
        self._have(
            sorted(
                {
                    b
                    for a, z in zip(first.tolist(), last.tolist(), strict=True)
                    for b in range(a, z + 1)
                }
            )
        )

    def _span(self, start: int, stop: int) -> np.ndarray:
        if stop == start:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        blocks = range(start * size // BLOCK_BYTES, (stop * size - 1) // BLOCK_BYTES + 1)
        self._have(list(blocks))
        whole = np.concatenate([self._block(block) for block in blocks])
        skipped = blocks.start * BLOCK_BYTES // size
        return whole[start - skipped : stop - skipped]

    def _from_disk(self, block: int) -> np.ndarray:
        path = self._path(block)
        try:
            data = path.read_bytes()
            with contextlib.suppress(OSError):
                os.utime(path)
        except OSError:
            data = b""
        if len(data) != self._size(block):  # another process made room, or was cut off
            (data,) = self._fetch([block])
        return np.frombuffer(data, self.dtype)

    def _have(self, blocks: list[int]) -> None:
        """Fetch the missing ones of some blocks, a few at a time."""
        missing = [b for b in blocks if not self._path(b).exists()]
        some = max(1, min(HELD_BLOCKS, self.limit_bytes // 4 // BLOCK_BYTES))
        for first in range(0, len(missing), some):
            self._fetch(missing[first : first + some])

    def _fetch(self, blocks: list[int]) -> list[bytes]:
        ranges = [
            (block * BLOCK_BYTES, block * BLOCK_BYTES + self._size(block)) for block in blocks
        ]
        found = self.store.pieces(".bin", ranges)
        with contextlib.suppress(OSError):  # a full disk: the blocks are read from the store again
            # a cache this small could not keep them until they are read
            if sum(map(len, found)) > self.limit_bytes // 2:
                return found
            self._make_room(sum(map(len, found)), len(blocks))
            for block, data in zip(blocks, found, strict=True):
                draft = self.folder / f".{block}-{os.getpid()}"
                draft.write_bytes(data)
                draft.replace(self._path(block))
        return found

    def _size(self, block: int) -> int:
        return min(BLOCK_BYTES, self.nbytes - block * BLOCK_BYTES)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08d}"

    def _make_room(self, needed: int, count: int) -> None:
        """Remove blocks of all corpora until the limit has room for the ones to be written."""
        self._fetched += count
        spare = min(COUNTED_EVERY * BLOCK_BYTES, self.limit_bytes // 4)
        if self._fetched * BLOCK_BYTES < spare:
            return
        self._fetched = 0
        held = [
            (entry.stat().st_mtime_ns, entry.stat().st_size, entry.path)
            for folder in self.folder.parent.parent.glob("*/blocks")
            for entry in os.scandir(folder)
        ]
        over = sum(size for _, size, _ in held) + needed + spare - self.limit_bytes
        for _, size, path in sorted(held):
            if over <= 0:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            over -= size
