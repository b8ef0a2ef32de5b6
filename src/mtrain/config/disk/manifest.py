"""The manifest next to `.bin/.idx`: the sources of a corpus, and the hashes of its files. Needs no
numpy.

`data tokenize`, and every command that changes a corpus, writes `PREFIX.manifest.json`. A digest
over its canonical form reveals every changed byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.schema.data import DataConfig
from mtrain.errors import CorruptData
from mtrain.units import MIB, bytes_

FORMAT = 1
SUFFIX = ".manifest.json"
MAX_BYTES = 256 * MIB
# The size up to which `check` reads a manifest, in a fraction of a second.
READ_BYTES = 16 * MIB
COUNTS = ("documents", "sequences", "tokens", "largest_id", "vocab_size")
FILES = (".bin", ".idx")


@dataclass(frozen=True)
class Manifest:
    """The facts of a corpus; see the module."""

    path: Path
    body: dict[str, Any]

    def count(self, name: str) -> int:
        """Return one of COUNTS; the largest id of an empty corpus is -1."""
        return int(self.body[name])

    @property
    def eod(self) -> int | None:
        """Return the id at the end of each document; None if there is none."""
        found = self.body["eod"]
        return found if isinstance(found, int) else None

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return the hash of the tokenizer.json that made the tokens; None for another kind of
        tokenizer.
        """
        tokenizer = self.body["tokenizer"]
        return tokenizer["sha256"] if tokenizer.get("kind") == "tokenizer.json" else None

    def bytes_of(self, suffix: str) -> int:
        """Return the size of one of FILES in bytes."""
        return int(self.body["files"][suffix]["bytes"])

    def sha256_of(self, suffix: str) -> str:
        """Return the hash of one of FILES."""
        return str(self.body["files"][suffix]["sha256"])

    def sizes_differ(self, prefix: Path, *, remote: bool = False) -> str:
        """Return the first file of the corpus whose size differs from the manifest; empty if none
        does.

        It reads no contents. Of a `remote` corpus it compares the local index; opening compares the
        `.bin`.

        Raises:
            OSError: a file is missing.
        """
        for suffix in (".idx",) if remote else FILES:
            file = prefix.with_name(prefix.name + suffix)
            if (size := file.stat().st_size) != self.bytes_of(suffix):
                return f"{file}: {size} bytes, and {self.path.name} records {self.bytes_of(suffix)}"
        return ""


def path_of(prefix: Path) -> Path:
    """Return the path of a corpus's manifest."""
    return prefix.with_name(prefix.name + SUFFIX)


def dump(body: dict[str, Any]) -> bytes:
    """Return the text of a manifest; `body` lacks its digest."""
    return _written(body | {"digest": _digest(body)})


def unwatched(data: DataConfig) -> str:
    """Return a warning about corpora of `data=indexed` without a manifest; empty if all
    have one.
    """
    if data.kind != "indexed":
        return ""
    data = data.without_excluded()
    named = (
        *(data.blend or (data.path,)),
        *(data.validation_blend or ()),
        *(data.test_blend or ()),
    )
    bare = [
        name
        for name in named
        if name and "://" not in name and not os.path.lexists(path_of(user_path(name)))
    ]
    if not bare:
        return ""
    more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
    said = f"no manifest next to {bare[0]}{more}: a changed token would stay unnoticed"
    return f"{said}; data verify {bare[0]} write=true makes one"


def read_manifest(prefix: Path, limit: int = MAX_BYTES) -> Manifest | None:
    """Return the manifest of a corpus; None if it is missing or larger than `limit`.

    Raises:
        CorruptData: it was changed after it was written.
        OSError: it cannot be read.
    """
    path = path_of(prefix)
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CorruptData(f"{path}: is no regular file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise CorruptData(f"{path}: {bytes_(size)}; a manifest may have {bytes_(MAX_BYTES)}")
    return None if size > limit else _parsed(path, path.read_bytes())


def _parsed(path: Path, data: bytes) -> Manifest:
    try:
        body = json.loads(data.decode())
        if not isinstance(body, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: no manifest: {str(error)[:200]}") from None
    digest = body.pop("digest", None)
    # The text must be canonical, too: two spellings of one manifest would have one digest.
    if digest != _digest(body) or _written(body | {"digest": digest}) != data:
        raise CorruptData(
            f"{path}: its digest does not match its contents: it was changed, or is incomplete",
            "  fix: copy it again from where the corpus was made, or tokenize again",
        )
    if wrong := _wrong(body):
        raise CorruptData(f"{path}: {wrong}")
    return Manifest(path, body)


def _wrong(body: dict[str, Any]) -> str:
    """Return a message for the first missing or invalid field of a manifest, or ""."""
    if body.get("format") != FORMAT:
        return f"format {str(body.get('format'))[:20]} of the manifest; {FORMAT} is known"
    missing = [
        name for name in COUNTS if not _is_count(body.get(name), -1 if name == "largest_id" else 0)
    ]
    files = body.get("files")
    tokenizer = body.get("tokenizer")
    inputs = body.get("inputs")
    if missing:
        return f"{missing[0]} is missing"
    if not isinstance(files, dict) or not all(_is_file(files.get(suffix)) for suffix in FILES):
        return "the hashes of .bin and .idx are missing"
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("sha256"), str):
        return "the tokenizer is missing"
    if not isinstance(inputs, list) or not all(map(_is_input, inputs)):
        return "the inputs are missing"
    if "eod" in body and (body["eod"] is None or _is_count(body["eod"])):
        return ""
    return "eod is missing"


def _is_count(held: Any, least: int = 0) -> bool:
    return type(held) is int and least <= held < 1 << 63


def _is_file(held: Any) -> bool:
    return (
        isinstance(held, dict)
        and _is_count(held.get("bytes"))
        and isinstance(held.get("sha256"), str)
    )


def _is_input(held: Any) -> bool:
    """Return whether an entry is a valid input: a file with counts."""
    if not isinstance(held, dict) or not isinstance(held.get("file"), str):
        return False
    return all(_is_count(value) for name, value in held.items() if name != "file")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(strict_json.dumps(body, sort_keys=True).encode()).hexdigest()


def _written(body: dict[str, Any]) -> bytes:
    return (strict_json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
