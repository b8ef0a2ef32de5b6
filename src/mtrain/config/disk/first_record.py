"""Detection of chats from the first record of a JSON Lines file, before anything is prepared."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import ENDING, unreadable

# The bytes within which the first line must end.
FIRST_BYTES = 1 << 24
# The bytes that may precede it: a byte order mark and empty lines.
BLANK = b"\xef\xbb\xbf \t\r\n"


def kind_of_chats(path: str | None) -> str | None:
    """Return the kind of chats, sft or preference, that a file holds by its first record; None: no
    chats.
    """
    record = _record(path)
    if "chosen" in record and "rejected" in record:
        return "preference"
    if any(isinstance(record.get(key), list) for key in ("messages", "conversations")):
        return "sft"
    return None


def is_documents(path: str | None) -> bool:
    """Return whether a file holds one document per line, as `{"text": ...}`, by its first
    record.
    """
    return isinstance(_record(path).get("text"), str)


def _record(path: str | None) -> dict[str, Any]:
    """Return the first record of a JSON Lines file; empty if it has none."""
    file = user_path(path) if path else None
    if (
        file is None
        or not file.name.endswith(ENDING)
        or unreadable(file) is not None
        or not file.is_file()
    ):
        return {}
    try:
        facts = os.stat(file)
        return _first(file, facts.st_size, facts.st_mtime_ns)
    except OSError:
        return {}


@cache
def _first(file: Path, size: int, changed: int) -> dict[str, Any]:
    """Return the first record; empty if it is no object. The cache key changes with the file."""
    with file.open("rb") as stream:
        head = stream.readline(FIRST_BYTES)
        # Exporters put empty lines first; a bound on the bytes keeps `check` fast on any file.
        while head and not head.strip(BLANK) and stream.tell() < FIRST_BYTES:
            head = stream.readline(FIRST_BYTES)
    try:
        found = json.loads(head.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
