"""A teacher's likeliest tokens at every place of a run's samples, computed once and written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.ckpt.state import TrainState
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import Collator, GlobalBatches, MicroBatch
from mtrain.data.teacher_rows import HASH, file_of, row_of, tokens_of
from mtrain.errors import say_page
from mtrain.mcore import api as mcore
from mtrain.mcore.models.distillation import TopK
from mtrain.mcore.models.language_model import LESSON
from mtrain.plan.teacher_file import PARTS, TeacherFacts, samples_read
from mtrain.train.assemble import batches, splits_of
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import to_device
from mtrain.train.loop.step import taught
from mtrain.train.teacher import build_teacher, digest_of
from mtrain.world.heartbeat import waiting
from mtrain.world.init import World, joined

PLACES = "teacher_places"
"""Key of a micro-batch: the place of each token in it, int64, as context parallelism splits it."""
SAID_S = 10.0
"""Seconds between two lines about the progress."""


def write(run: RunConfig, out: Path) -> None:
    """Compute the rows of all samples that a run reads, with its teacher in its layout, and write
    them to a new folder. Every rank calls it.

    Raises:
        CorruptData: the weights of the teacher or the data are not whole.
    """
    with joined(run) as world:
        splits = splits_of(run)
        chunks = build_teacher(run, world)
        facts = _facts(run, splits)
        if world.is_rank0:
            out.mkdir(parents=True)
        with waiting():
            dist.barrier()
        for part in PARTS:
            data = _data_of(run, world, splits, part)
            if data is not None:
                state = TrainState(chunks, None, None, teacher=chunks)
                context = TrainContext(run, world, state, data, None)
                _write_part(context, data, file_of(out, part), facts)
        with waiting():
            dist.barrier()
        if world.is_rank0:
            facts.write(out)
            say_page(f"{out}: {_in_words(facts)}")


def _facts(run: RunConfig, splits: Splits) -> TeacherFacts:
    o = run.objective
    assert o.distil_top_k is not None
    assert o.temperature is not None
    assert o.teacher is not None
    known = splits.identity()
    samples = samples_read(run)
    if splits.validation is None:
        samples["validation"] = 0
    return TeacherFacts(
        samples,
        run.data.length,
        run.trainer.seed,
        run.model.loss_vocab_size,
        o.distil_top_k,
        o.temperature,
        o.teacher,
        digest_of(run),
        known.get("fingerprint"),
        known.get("tokenizer_sha256"),
    )


def _data_of(run: RunConfig, world: World, splits: Splits, part: str) -> GlobalBatches | None:
    if part == "train":
        return batches(run, world, splits, part)
    wanted = samples_read(run)[part]
    if not wanted or splits.validation is None:
        return None
    return batches(run, world, splits, part, wanted)


def _write_part(
    context: TrainContext, data: GlobalBatches, file: Path, facts: TeacherFacts
) -> None:
    """Write the rows of a part; each data-parallel rank writes those of its own samples."""
    world = context.world
    batch = context.run.trainer.batch
    total = samples_read(context.run)["train"] if data.limit is None else data.steps * batch
    placed = _Placed(data.collator)
    data.collator = placed
    writes = world.coords["tp"] == 0 and world.coords["cp"] == 0
    said = time.monotonic()
    with ExitStack() as stack:
        put = stack.enter_context(_writer(file, facts.row_bytes + 2 * HASH)) if writes else None
        for consumed in range(0, total, batch):
            read = data.microbatches(consumed, min(batch, total - consumed))
            # Balancing by work collates samples before the micro-batches do.
            numbers = placed.numbers[-len(read) :]
            placed.numbers.clear()
            here = [dict(to_device(each, world)) for each in read]  # type: ignore[arg-type]
            places = [each.pop(PLACES) for each in here]
            # Only the last stage has lessons.
            lessons = [each.get(LESSON) for each in taught(context, here)]
            for lesson, mine, host, own in zip(lessons, places, read, numbers, strict=True):
                if lesson is None:
                    continue
                ids, values = _whole(lesson.top, mine)
                if put is not None:
                    rows = zip(
                        own,
                        tokens_of(host, len(own)),
                        np.split(ids, len(own)),
                        np.split(values, len(own)),
                        strict=True,
                    )
                    for number, tokens, row_ids, row_values in rows:
                        put(int(number), row_of(facts, tokens, row_ids, row_values))
            if world.is_rank0 and time.monotonic() - said > SAID_S:
                said = time.monotonic()
                say_page(f"{file.stem}: {consumed + batch} of {total} samples")


class _Placed:
    """A collator that remembers the numbers of samples and marks the places of their tokens."""

    def __init__(self, inner: Collator) -> None:
        self.inner = inner
        self.numbers: list[np.ndarray] = []

    def __call__(self, windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        batch: Any = self.inner(windows, numbers)
        self.numbers.append(numbers)
        shape = batch["tokens"].shape
        batch[PLACES] = torch.arange(shape.numel()).view(shape)
        return batch  # type: ignore[no-any-return]


def _whole(top: TopK, places: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest ids [tokens, k] of a micro-batch and their log-probabilities [tokens, k
    + 1], of all ranks that have parts of its sequences; `places` [b, s] are those of this rank.
    """
    rows, length = places.shape
    # The rows of a lesson go by place first, then by sample.
    parts = [each.view(length, rows, -1).transpose(0, 1).flatten(0, 1) for each in top]
    group = mcore.parallel_state.get_context_parallel_group()
    whole = []
    for part in (places.flatten(), *parts):
        held = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(held, part.contiguous(), group=group)
        whole.append(torch.cat(held).cpu())
    order = whole[0].argsort()
    return whole[1][order].numpy(), whole[2][order].numpy()


@contextmanager
def _writer(file: Path, size: int) -> Iterator[Any]:
    """Yield a function that writes the row of a number, of `size` bytes; the file is then whole on
    the disk.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        yield lambda number, row: os.pwrite(descriptor, row, number * size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_words(facts: TeacherFacts) -> str:
    parts = ", ".join(f"{number} of {part}" for part, number in facts.samples.items())
    size = sum(facts.samples.values()) * facts.row_bytes
    return f"{parts}; {facts.distil_top_k} tokens at each place, {size} bytes"
