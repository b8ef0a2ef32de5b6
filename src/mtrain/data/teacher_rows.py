"""A teacher's likeliest tokens at every place of the samples of a run, in files next to the data.

The row of a sample, by its number: ids, int32 [seq_length, k]; log-probabilities, fp32 [seq_length,
k + 1]; a hash of the tokens that the teacher read, and a hash of the facts of the folder, these
tokens and the row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain.data.batch import Collator, MicroBatch
from mtrain.errors import ConfigError, CorruptData
from mtrain.plan.teacher_file import KEY, TeacherFacts

IDS = "teacher_ids"
VALUES = "teacher_log_probabilities"
HASH = 8
"""Bytes of each of the two hashes of a row."""


def file_of(folder: Path, part: str) -> Path:
    """Return the file of the rows of a part."""
    return folder / f"{part}.rows"


def tokens_of(batch: MicroBatch, rows: int) -> list[bytes]:
    """Return what a teacher reads of each row of a micro-batch: tokens and positions, which tell
    where packed documents begin.
    """
    parts = [batch[key].reshape(rows, -1).numpy() for key in ("tokens", "position_ids")]  # type: ignore[literal-required]
    return [b"".join(part[row].tobytes() for part in parts) for row in range(rows)]


def row_of(facts: TeacherFacts, tokens: bytes, ids: np.ndarray, values: np.ndarray) -> bytes:
    """Return the row of a sample from ids [s, k] and log-probabilities [s, k + 1]."""
    body = ids.astype(np.int32).tobytes() + values.astype(np.float32).tobytes()
    return body + _hash(tokens) + _hash(facts.hash, tokens, body)


def teaching_collator(folder: Path, part: str, facts: TeacherFacts, inner: Collator) -> Collator:
    """Return a collator that adds a teacher's rows to the micro-batches of another one.

    Raises, where it collates:
        ConfigError: a sample has other tokens than the teacher read.
        CorruptData: a row is not as it was written.
    """
    file = file_of(folder, part)
    read = _reader(file, facts.row_bytes + 2 * HASH)
    length, k = facts.seq_length, facts.distil_top_k

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        batch: Any = inner(windows, numbers)
        ids = np.empty((len(numbers), length, k), np.int32)
        values = np.empty((len(numbers), length, k + 1), np.float32)
        for place, tokens in enumerate(tokens_of(batch, len(numbers))):
            number = int(numbers[place])
            row = read(number)
            body, of_tokens, of_row = row[: -2 * HASH], row[-2 * HASH : -HASH], row[-HASH:]
            whole = len(body) == facts.row_bytes
            if not whole or _hash(facts.hash, tokens, body) != of_row:
                _refuse(file, part, number, other=whole and of_tokens != _hash(tokens))
            ids[place] = np.frombuffer(body, np.int32, length * k).reshape(length, k)
            rest = np.frombuffer(body, np.float32, offset=ids[place].nbytes)
            values[place] = rest.reshape(length, k + 1)
        rows, width = batch["tokens"].shape
        batch[IDS] = torch.from_numpy(ids).view(rows, width, k)
        batch[VALUES] = torch.from_numpy(values).view(rows, width, k + 1)
        return batch  # type: ignore[no-any-return]

    return collator


def _reader(file: Path, size: int) -> Callable[[int], bytes]:
    """Return a function that reads a row of a file; short where the file ends."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CorruptData(f"{file}: {error.strerror}") from None
    # The file stays open as long as the run.
    return lambda number: os.pread(descriptor, size, number * size)


def _refuse(file: Path, part: str, number: int, *, other: bool) -> None:
    if other:
        why = f"sample {number} of {part} has other tokens than the teacher read"
        fix = "a file of the same data, order and packing"
        raise ConfigError.of("MT493", KEY, str(file.parent), why, fix)
    raise CorruptData(f"{file}: the row of sample {number} is not as `data distil` wrote it")


def _hash(*parts: bytes) -> bytes:
    found = blake2b(digest_size=HASH)
    for part in parts:
        found.update(part)
    return found.digest()
