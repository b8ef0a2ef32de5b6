"""Records of JSON Lines: their lines, learning flags, harmless metadata, and unknown keys."""

from __future__ import annotations

import difflib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.errors import CorruptData

# Keys of known formats that flag whether something is learned: 1 or true, 0 or false
FLAGS = ("weight", "loss", "train", "loss_mask")
_HARMLESS = """
    id _id uuid guid idx index uid hash sha256 prompt_id conversation_id conversation_hash
    session_id thread_id
    message_id parent_id turn turn_id turns num_turns metadata meta extra info source sources
    dataset
    dataset_name dataset_id origin original_id url file filename path category categories
    subcategory domain
    topic topics task tasks task_type tag tags keywords subset split language lang languages license
    licence
    author annotator user_id created created_at updated_at timestamp time date version model
    model_name model_id
    generator engine provider score_chosen score_rejected chosen_score rejected_score chosen_rating
    rejected_rating chosen_model rejected_model title description comment comments note notes
    quality score
    scores rating ratings difficulty length num_tokens token_count n_tokens usage finish_reason
    stop_reason
    logprobs system_fingerprint object toxicity redacted moderation openai_moderation
    detoxify_moderation
    annotations parallel_tool_calls
"""
# Names, places, counts and ratings: in no known format do they affect what is learned
HARMLESS = frozenset(_HARMLESS.split())


@dataclass(frozen=True)
class Keys:
    """The known keys besides those of the format: ignored by the user, or read by a template."""

    ignored: frozenset[str] = frozenset()
    """Keys of `data.ignored_keys`, which are not read."""
    template: str = ""
    """The text of the chat templates, which may read any key of a message."""

    def template_reads(self, key: str) -> bool:
        """Return whether a template reads a key: as `.key`, `'key'` or `"key"`."""
        # A template is a program, so nobody knows which keys it reads. A name that it mentions
        # counts: taken for read when it is not, a key is lost; the other way, a good file is
        # refused.
        word = re.escape(key)
        return re.search(rf"""\.\s*{word}\b|'{word}'|"{word}\"""", self.template) is not None

    def kept(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values without ignored keys."""
        return {key: value for key, value in values.items() if key not in self.ignored}

    def refuse_unknown(self, values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Pass values with only known keys; a key with a null value counts as missing.

        Raises:
            CorruptData: an unknown key might change what is learned; similar known keys are named.
        """
        read = [*known, *FLAGS]
        strange = [
            key
            for key, value in values.items()
            if value is not None
            and key not in read
            and key.lower() not in HARMLESS
            and key not in self.ignored
        ]
        if not strange:
            return
        similar = dict.fromkeys(
            one for key in strange for one in difflib.get_close_matches(key, read, n=2, cutoff=0.6)
        )
        meant = f"; did you mean {' or '.join(similar)}?" if similar else ""
        names = ", ".join(key[:60] for key in strange[:8])
        ignore = f"data.ignored_keys=[{','.join(strange[:8])}]"
        if len(strange) == 1:
            rule = f"an unknown key: {names}, which might change what is learned, and nothing reads"
            fix = f"rename or remove it, or {ignore}"
        else:
            rule = f"unknown keys: {names}, which nothing reads"
            fix = f"rename or remove them, or {ignore}"
        raise CorruptData(f"{where} has {rule}{meant}; {fix}")


def is_learning_flag(value: Any) -> bool:
    """Return whether a value is a learning flag: true, false, 1 or 0."""
    # Tables have 1.0 for it; 0.7 would be a weight, or a measured loss in a column of that name.
    return isinstance(value, bool | int | float) and value in (0, 1)


def shown(flags: Mapping[str, Any]) -> str:
    """Return keys and values in the form of messages."""
    return ", ".join(f"{key}: {str(value).lower()[:40]}" for key, value in flags.items())


def learned(values: Mapping[str, Any], where: str) -> bool | None:
    """Return the learning flag of a record or message, or None without one.

    Raises:
        CorruptData: a flag is neither yes nor no, or two flags contradict each other.
    """
    flags = {key: values[key] for key in FLAGS if values.get(key) is not None}
    for key, value in flags.items():
        if not is_learning_flag(value):
            raise CorruptData(
                f"{where}: its {key} is {str(value)[:40]!r}, and a message or record is learned"
                " whole or not at all: 1 or true, 0 or false; where it says something else,"
                f" data.ignored_keys=[{key}]"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        fix = f"data.ignored_keys=[{next(iter(flags))}] where that says something else"
        raise CorruptData(
            f"{where} says both that it is learned and that it is not: {shown(flags)}; {fix}"
        )
    return next((bool(value) for value in flags.values()), None)


def require_learned(values: Mapping[str, Any], where: str) -> None:
    """Pass a record without a flag that excludes it from learning.

    Raises:
        CorruptData: a flag excludes it, or as `learned`.
    """
    if learned(values, where) is False:
        key = next(name for name in FLAGS if values.get(name) is not None)
        fix = f"remove the line, or data.ignored_keys=[{key}] where that says something else"
        raise CorruptData(f"{where} is not to be learned ({shown({key: values[key]})}): {fix}")


class JsonLines:
    """The lines of a file that are not blank; `len` counts them.

    A line is read on demand.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            # a file of no bytes cannot be mapped
            self._bytes: Any = b""
            if size:
                self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        starts = []
        numbers = []
        at = 0
        line = 0
        while at < size:
            end = self._bytes.find(b"\n", at)
            line += 1
            if end < 0:
                end = size
            if self._bytes[at:end].strip():
                starts.append(at)
                numbers.append(line)
            at = end + 1
        self._starts = np.array(starts, np.int64)
        self.numbers = np.array(numbers, np.int64)
        """The line of each record, from 1; int64 [records]."""

    def __len__(self) -> int:
        return len(self._starts)

    def line(self, number: int) -> bytes:
        """Return the bytes of a record."""
        start = int(self._starts[number])
        end = self._bytes.find(b"\n", start)
        return bytes(self._bytes[start : end if end >= 0 else None])

    @contextmanager
    def named(self, number: int) -> Iterator[None]:
        """Put the place of a record in front of a CorruptData that is raised inside."""
        try:
            yield
        except CorruptData as error:
            raise CorruptData(f"{self.place(number)}: {error}") from None

    def place(self, number: int) -> str:
        """Return file and line of a record."""
        return f"{self.file}:{self.numbers[number]}"
