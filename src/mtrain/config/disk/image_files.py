"""Folders of images with texts: which of their files says what belongs together."""

from __future__ import annotations

import os
from pathlib import Path

from mtrain.config.disk.files import unreadable

ENDING = ".jsonl"
MOST_ENTRIES = 100_000
"""Entries of a folder that are looked at for the file: it stands beside folders of images, or among
few images.
"""


WHICH = "which text belongs to which image"


def records_of(path: Path, what: str) -> tuple[Path | None, str]:
    """Return the JSON Lines file that a folder holds, or that a path names, and else why there is
    none; `what` one says.
    """
    rule = unreadable(path)
    if rule is not None:
        return None, rule
    if path.is_file():
        if path.name.endswith(ENDING):
            return (path, "")
        return (None, f"is a file that does not end in {ENDING}")
    found = []
    with os.scandir(path) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_ENTRIES:
                return None, f"holds more than {MOST_ENTRIES} entries: name its {ENDING} file"
            if (
                entry.name.endswith(ENDING)
                and not entry.name.startswith(".")
                and Path(entry.path).is_file()
            ):
                found.append(entry.name)
    if len(found) == 1:
        file = path / found[0]
        rule = unreadable(file)
        return (file, "") if rule is None else (None, f"{found[0]} {rule}")
    said = "no file" if not found else f"{len(found)} files ({', '.join(sorted(found)[:3])})"
    return None, f"holds {said} that ends in {ENDING}, and one says {what}"
