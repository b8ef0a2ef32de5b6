"""The index that each rank leaves of its files, and the manifest's tensors and files made of all.

Needs no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder


def index_name(rank: int) -> str:
    """Return the name of the index of a rank, in a draft."""
    return f"rank_{rank:05d}.json"


def write(draft: Path, rank: int, written: list[dict[str, Any]]) -> None:
    """Leave the index of a rank's files, which are on disk; it appears at once and whole."""
    hidden = draft / f".{index_name(rank)}"
    folder.write_json(hidden, {"written": written})
    os.rename(hidden, draft / index_name(rank))


def merged(draft: Path, size: int) -> dict[str, Any]:
    """Return the manifest's tensors and files from the index of each rank, which it removes."""
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for rank in range(size):
        path = draft / index_name(rank)
        written = json.loads(path.read_text())["written"]
        # The index of a rank is of the draft: the manifest has all of it.
        path.unlink()
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
