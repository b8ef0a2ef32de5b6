"""Documents of packed samples: split, run one by one as the reference of a packed run, and observed
one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch

from mtrain.data.batch import FURTHER, GlobalBatches
from mtrain.mcore import api as mcore
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import documents
from mtrain.train.loop.step import Batch, forward_step

MOST_OBSERVED = 3


def run_alone(
    context: TrainContext, batches: Sequence[Batch], *, forward_only: bool, ends: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Run every document as a sequence of its own, on one rank, without any packing; see
    `run_schedule`.

    `ends` are the tokens that end a document: there each is cut, begins at position 0 and has no
    loss at its end, whatever the packed batches contain.
    """
    parts = [part for whole in documents(batches) for part in _parted(whole, ends)]
    reports = mcore.get_forward_backward_func()(
        forward_step_func=partial(forward_step, context.objective),
        data_iterator=iter(parts),
        model=context.state.chunks[0],
        num_microbatches=len(parts),
        seq_length=context.run.data.length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return [report["metrics"] for report in reports]


def alone(ends: Sequence[int]) -> partial[list[torch.Tensor]]:
    """Return `run_alone` as the schedule of a run."""
    return partial(run_alone, ends=ends)


def _parted(
    whole: dict[str, torch.Tensor], ends: Sequence[int]
) -> Iterator[dict[str, torch.Tensor]]:
    tokens = whole["tokens"]
    ending = torch.isin(tokens, torch.tensor(ends, dtype=tokens.dtype))
    mask = whole["loss_mask"].masked_fill(ending, 0.0)
    cuts = (ending[0].nonzero().flatten() + 1).tolist()
    # Two bounds may coincide where a document ends with the sequence.
    for start, stop in itertools.pairwise(sorted({0, *cuts, tokens.shape[1]})):
        part = {key: value[:, start:stop] for key, value in whole.items()}
        # from 0, as in a sequence of its own
        positions = torch.arange(stop - start).unsqueeze(0)
        if FURTHER in part:
            part[FURTHER] = _inside(part[FURTHER])
        yield part | {"loss_mask": mask[:, start:stop], "position_ids": positions}


def _inside(further: torch.Tensor) -> torch.Tensor:
    """Return the weights of further tokens [1, length, depths] without predictions of tokens after
    the document.
    """
    length, depths = further.shape[1:]
    left = length - 1 - torch.arange(length)
    return further * (left[:, None] >= torch.arange(1, depths + 1))


@dataclass(frozen=True)
class Observed:
    """A document of the first global batch, by its tokens `start` to `stop` of all samples end to
    end.
    """

    number: int
    sample: int
    start: int
    stop: int


def observed(data: GlobalBatches, size: int) -> list[Observed]:
    """Return a few documents of the first `size` samples that have a loss, the longer half, the
    same on every rank.
    """
    # As on one rank with one micro-batch: places of tokens must not depend on the layout.
    batches = GlobalBatches(data.samples, size, size, 0, 1, data.collator, data.limit)
    whole = batches.microbatches(0)[0]
    bounds = whole["cu_seqlens"].tolist()
    length = whole["tokens"].shape[1] // size
    pairs = enumerate(itertools.pairwise(bounds))
    counted = [
        Observed(number, start // length, start, stop)
        for number, (start, stop) in pairs
        if bool(whole["loss_mask"][:, start:stop].any())
    ]
    # Short documents have gradients of rounding errors: the longer half shows more.
    lengths = sorted(document.stop - document.start for document in counted)
    counted = [
        document
        for document in counted
        if document.stop - document.start >= lengths[len(lengths) // 2]
    ]
    chosen = np.unique(
        np.linspace(0, len(counted) - 1, min(MOST_OBSERVED, len(counted))).round().astype(int)
    )
    return [counted[index] for index in chosen]


def only(document: Observed, data: GlobalBatches, size: int) -> list[Batch]:
    """Return this rank's micro-batches of the first step, in which only the loss of one document
    counts.
    """
    batches = data.microbatches(0, size)
    numbers = data.numbers(0, size)
    for batch, rows in zip(batches, numbers, strict=True):
        length = batch["tokens"].shape[1] // len(rows)
        places = torch.from_numpy((rows[:, None] * length + np.arange(length)).ravel())
        inside = (places >= document.start) & (places < document.stop)
        batch["loss_mask"] = batch["loss_mask"] * inside
        if FURTHER in batch:
            further = cast(dict[str, torch.Tensor], batch)
            further[FURTHER] = further[FURTHER] * inside[:, None]
    return cast(list[Batch], batches)
