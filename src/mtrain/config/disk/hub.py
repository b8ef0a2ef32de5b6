"""Names of models on the Hugging Face hub, where a folder is meant: nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path

from mtrain.config.compose.paths import user_path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = (".json", ".jsonl", ".yaml", ".yml", ".safetensors", ".model", ".txt")


def download_of(text: str, files: str = "") -> tuple[str, str] | None:
    """Return the command that downloads `files` (all if that is empty) of the model that `text` may
    name on the hub, and the folder where they are then. Return None for the path of a file, and
    where the path or its folder exists.
    """
    if _NAME.fullmatch(text) is None or text.endswith(_FILES):
        return None
    if Path(user_path(text)).exists() or Path(user_path(text.partition("/")[0])).is_dir():
        return None
    folder = text.rpartition("/")[2]
    words = ["hf download", text, *([files] if files else []), "--local-dir", folder]
    return " ".join(words), folder
