"""Log-probabilities of the starting model, computed once, in the place of a reference model.

They are a number for each answer of the data, which checkpoints hold: a resumed run has the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.config.resolve.batches import samples_of, stages
from mtrain.data import PairSamples
from mtrain.data.batch import GlobalBatches
from mtrain.data.pairs import pair_collator
from mtrain.mcore import api as mcore
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import to_device
from mtrain.train.loop.step import log_probabilities
from mtrain.train.pairs import pairs_of
from mtrain.world.heartbeat import begin_phase


def prepare(context: TrainContext) -> None:
    """Give the samples of a run the log-probabilities of the reference; compute them with the
    weights as they are now, unless a checkpoint had them.
    """
    state = context.state
    for part, data in (("train", context.train_data), ("validation", context.valid_data)):
        if data is None:
            continue
        if not state.scores_known:
            state.scores[part].copy_(_computed(context, data))
        assert isinstance(data.samples, PairSamples)
        data.samples.scores = state.scores[part].cpu().numpy()
    state.scores_known = True


def _computed(context: TrainContext, data: GlobalBatches) -> torch.Tensor:
    """Return the sum of log-probabilities of each answer that the run reads, fp64 [answers], the
    same on every rank; 0 for the others.
    """
    run = context.run
    world = context.world
    source = data.samples
    assert isinstance(source, PairSamples)
    wanted = data.limit or samples_of(stages(run), run.trainer.steps)
    numbers = np.arange(min(len(source), wanted + wanted % 2))
    rows = np.unique([source.row_of(int(number)) for number in numbers])
    # Every rank takes whole micro-batches, of interleaved stages whole groups of them: the last
    # ones repeat answers.
    stride = run.trainer.micro * world.grid.dp
    whole = stride * (run.parallel.pp if run.parallel.vpp > 1 else 1)
    filled = np.resize(rows, -(-len(rows) // whole) * whole)
    mine = filled.reshape(-1, world.grid.dp, run.trainer.micro)[:, world.coords["dp"]]
    found = torch.zeros(len(source), dtype=torch.float64, device=world.torch_device)
    collator = pair_collator(_ByRow(source), mismatched=False)
    group = mcore.parallel_state.get_context_parallel_group()
    counts = world.coords["tp"] == 0 and world.coords["cp"] == 0
    step = max(1, run.trainer.batch // stride)
    for first in range(0, len(mine), step):
        begin_phase("reference")
        places = mine[first : first + step]
        windows = torch.zeros(0)
        batches = [to_device(collator(windows, each), world) for each in places]  # type: ignore[arg-type]
        for values, batch, each in zip(
            log_probabilities(context, batches, "none"), batches, places, strict=False
        ):
            pairs = pairs_of(values, batch["loss_mask"], None, group)
            sums = torch.stack([pairs.chosen, pairs.rejected], dim=1).flatten()
            if counts:
                found[torch.from_numpy(each).to(found.device)] = sums
    # A row that two ranks computed is the same on both, and no log-probability is above the 0 of
    # those that a rank did not compute.
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return found


class _ByRow:
    """The answers of a split by place in the file, with a source's part for collators."""

    scores: Any = None

    def __init__(self, source: PairSamples) -> None:
        self.sample = source.row
