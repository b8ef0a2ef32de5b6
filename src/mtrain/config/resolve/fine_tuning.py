"""Defaults of fine-tuning: published rates and batches by the size of the model, and steps by the
number of chats.

docs/reference/defaults.md has the sources beside each other.
"""

from __future__ import annotations

import os
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

from mtrain.config.compose.paths import user_path
from mtrain.config.disk.image_files import records_of
from mtrain.config.resolve.sizes import nearest
from mtrain.config.schema.run import RunConfig

CHATS = ("sft", "preference")
"""Kinds of data that are written by the chat template of a tokenizer."""
EPOCHS = 2
"""Times that Tulu 3 reads its chats."""
CHAT_TOKENS = 1024
"""Tokens of a chat, where chats are packed and batches are counted in chats: Tulu 3's have 700 on
average.
"""
LETTERS = 4
"""Bytes of a file of chats per token."""
FEWEST_STEPS = 30
SMALLEST_BATCH = 8
"""Steps that an epoch has, as LIMA's (arXiv 2305.11206), before the batch of a small file is
halved; and how far.
"""
STEPS_UNSEEN = 500
"""Steps of a run whose chats cannot be counted here."""
COUNTED_BYTES = 1 << 26
"""Bytes of a file in which chats are counted; of a larger one, the rest is taken to be alike."""


class Tuned(NamedTuple):
    """A published fine-tuning."""

    name: str
    parameters: float
    lr: float
    batch: int
    source: str


TULU_3 = "Tulu 3 (arXiv 2411.15124)"
QLORA = "QLoRA (arXiv 2305.14314)"
ALL_WEIGHTS = (
    Tuned("3B", 3.1e9, 2e-5, 128, "SmolLM3 (Hugging Face's alignment-handbook)"),
    Tuned("8B", 8e9, 5e-6, 128, TULU_3),
    Tuned("70B", 70.6e9, 2e-6, 128, TULU_3),
)
"""Rate and chats per step where all weights are trained."""
ADAPTERS = (
    Tuned("7B", 6.7e9, 2e-4, 16, QLORA),
    Tuned("13B", 13e9, 2e-4, 16, QLORA),
    Tuned("33B", 32.5e9, 1e-4, 16, QLORA),
    Tuned("65B", 65.2e9, 1e-4, 16, QLORA),
)
"""The same where low-rank adapters are trained."""


def published(run: RunConfig) -> Tuned:
    """Return the published fine-tuning of the nearest size, of adapters where the run trains
    adapters.
    """
    return nearest(ADAPTERS if run.peft.kind is not None else ALL_WEIGHTS, run.model)


def batch_of(run: RunConfig) -> tuple[int, str]:
    """Return the samples of a step, and why: chats, or windows of packed chats that hold as many
    tokens.
    """
    row = published(run)
    samples = row.batch
    why = f"{row.batch} chats of {row.source}: its {row.name} model"
    if run.data.packed:
        samples = ceil(row.batch * CHAT_TOKENS / run.data.length)
        why = f"{why}, {CHAT_TOKENS} tokens each"
    held = samples_of_an_epoch(run)
    full = samples
    while held is not None and samples > SMALLEST_BATCH and held < FEWEST_STEPS * samples:
        samples = max(SMALLEST_BATCH, samples // 2)
    if samples < full:
        why = (
            f"{held} samples in data.path: {FEWEST_STEPS} steps an epoch, or {SMALLEST_BATCH}"
            " samples a step"
        )
    return samples, why


def steps_of(run: RunConfig) -> tuple[int, str]:
    """Return the steps of a run whose batch is known, and why."""
    held = samples_of_an_epoch(run)
    if held is None:
        return (
            STEPS_UNSEEN,
            f"trainer.fine_tuning true, and data.kind {run.data.kind} has no chats to count here",
        )
    return (
        max(1, ceil(EPOCHS * held / run.trainer.batch)),
        f"{EPOCHS} epochs of {held} samples, as {TULU_3}",
    )


def samples_of_an_epoch(run: RunConfig) -> int | None:
    """Return how many samples of training data.path holds; None where it has no chats, or is not
    here.
    """
    d = run.data
    if d.kind not in CHATS or d.path is None:
        return None
    file, _ = records_of(user_path(d.path), "what the chats are")
    if file is None:
        return None
    try:
        facts = os.stat(file)
        chats = _count(file, facts.st_size, facts.st_mtime_ns)
    except OSError:
        return None
    if not chats:
        return None
    samples = chats * d.split[0] / (sum(d.split) or 1)
    if d.packed:
        samples *= min(1.0, facts.st_size / chats / LETTERS / d.length)
    return max(1, round(samples))


@cache
def _count(file: Path, size: int, changed: int) -> int:
    """Return the lines of a file that has something in them; a file that was changed is another
    one.
    """
    lines = read = 0
    with file.open("rb") as stream:
        while read < COUNTED_BYTES and (block := stream.read(1 << 20)):
            read += len(block)
            lines += block.count(b"\n")
            last = block[-1:]
    if not read:
        return 0
    if read < size:
        return max(1, round(lines * size / read))
    return lines + (last != b"\n")
