"""The tokenizer in the run folder: the corpus may be gone when text is generated."""

from __future__ import annotations

import shutil
from pathlib import Path

from mtrain.data import Splits
from mtrain.data.chats.template import FILES as CHAT_FILES
from mtrain.data.chats.template import TEMPLATE_FILE
from mtrain.errors import warn
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext

TOKENIZER_FILE = "tokenizer.json"


class KeepTokenizer(Hook):
    """A copy of the tokenizer, and of its folder's files about chats and special tokens."""

    def __init__(self, folder: Path, splits: Splits, named: Path | None) -> None:
        """Copy into `folder`; `named` is the tokenizer that the run names, of which a corpus in the
        cache has a copy, but not of the files next to it.
        """
        self.folder = folder
        self.splits = splits
        self.named = named

    def start(self, context: TrainContext) -> None:
        """Copy the files on rank 0; if the disk refuses, warn."""
        tokenizer = self.splits.tokenizer
        if tokenizer is None or not context.world.is_rank0:
            return
        try:
            self._forget_another(tokenizer)
            for name in (TOKENIZER_FILE, *CHAT_FILES):
                source = self._source(tokenizer, name)
                if name == TOKENIZER_FILE or source.is_file():
                    draft = self.folder / f".{name}"
                    shutil.copyfile(source, draft)
                    draft.replace(self.folder / name)
        except OSError as error:
            warn(
                f"{self.folder / TOKENIZER_FILE} cannot be written ({error.strerror}): generate"
                " will not find it"
            )

    def _source(self, tokenizer: Path, name: str) -> Path:
        if name == TOKENIZER_FILE:
            return tokenizer
        if name == TEMPLATE_FILE and self.splits.corpus.template is not None:
            return self.splits.corpus.template
        return (self.named or tokenizer).with_name(name)

    def _forget_another(self, tokenizer: Path) -> None:
        """Remove the files that belong to another tokenizer of the folder."""
        held = self.folder / TOKENIZER_FILE
        if held.is_file() and held.read_bytes() != tokenizer.read_bytes():
            for name in CHAT_FILES:
                (self.folder / name).unlink(missing_ok=True)
