"""Names of models on the Hugging Face hub, where a folder is meant: nothing is downloaded here."""

from __future__ import annotations

import re
from pathlib import Path

from mtrain.config.paths import user_path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def download_of(text: str, files: str = "") -> tuple[str, str] | None:
    """The command that downloads `files` (all, where that is empty) of the model that `text` may name on the hub, and
    the folder where they are then. None: there is such a path, or it is no such name.
    """
    if _NAME.fullmatch(text) is None or Path(user_path(text)).exists():
        return None
    folder = text.rpartition("/")[2]
    words = ["hf download", text, *([files] if files else []), "--local-dir", folder]
    return " ".join(words), folder
