"""The tokenizer of a model: that of the run or Hugging Face folder that its weights come from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtrain.config.compose.interpolate import at
from mtrain.config.compose.paths import CHECKPOINTS, RESUME_WORDS, user_path
from mtrain.config.schema.run import RunConfig

# The file in such a folder, and the folder of a run with the files of its imported weights.
TOKENIZER = "tokenizer.json"
KEPT = "hf"
# Tokenizer files in formats that mtrain does not read as a model's tokenizer.
OTHERS = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
)


def folder_of_the_model(run: RunConfig, checkpoint: Path | None = None) -> Path | None:
    """Return the folder of a run's starting weights; None if they are drawn at random.

    It is that of `checkpoint`, else the one that the configuration names by path. A run that `auto`
    or `latest` resumes started from `checkpoint.init_from`.
    """
    resumed = run.checkpoint.resume
    named = run.checkpoint.init_from if resumed is None or resumed in RESUME_WORDS else resumed
    if checkpoint is None and named is None:
        return None
    path = checkpoint if checkpoint is not None else user_path(named or "")
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


def model_tokenizer(run: RunConfig, checkpoint: Path | None = None) -> Path | None:
    """Return the `tokenizer.json` of the model that a run starts from, or None."""
    folder = folder_of_the_model(run, checkpoint)
    return None if folder is None else tokenizer_of(folder)


def tokenizer_of(folder: Path) -> Path | None:
    """Return the `tokenizer.json` of a run or Hugging Face folder; None if it has none."""
    file = folder / TOKENIZER
    return file if os.path.isfile(file) else None


def unread_tokenizer(folder: Path) -> Path | None:
    """Return a tokenizer file of a folder in a format that mtrain cannot read."""
    found = (place / name for place in (folder, folder / KEPT) for name in OTHERS)
    return next((file for file in found if os.path.isfile(file)), None)


def is_from_elsewhere(folder: Path) -> bool:
    """Return whether a folder's weights were trained elsewhere, in Hugging Face's form."""
    return any(os.path.isfile(folder / name) for name in ("config.json", "conversion.json"))


def sha256_of(file: Path) -> str:
    """Return the hash of a file, cached until the file changes.

    Raises:
        OSError: the file cannot be read.
    """
    # Size, time and inode: a file that is replaced by another of the same size in the same tick
    # still has another inode.
    stamp = file.stat()
    return _sha256(file, (stamp.st_size, stamp.st_mtime_ns, stamp.st_ino))


@lru_cache(maxsize=16)
def _sha256(file: Path, stamp: tuple[int, ...]) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


KEY = "checkpoint.init_from"


def start_of(
    settings: Mapping[str, Any], recipe: Mapping[str, Any], choice: Mapping[str, Any]
) -> str | None:
    """Return the folder named by the command line, the recipe or the choice; else None."""
    if KEY in settings:
        found = settings[KEY]
    else:
        found = at(recipe, KEY) or choice.get("init_from")
    return found if isinstance(found, str) and found else None


def describes_a_model(recipe: Mapping[str, Any], needed: Collection[str]) -> bool:
    """Return whether a recipe sets every required key of a model."""
    stated = recipe.get("model")
    return isinstance(stated, Mapping) and stated.keys() >= set(needed)
