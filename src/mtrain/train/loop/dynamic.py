"""Dynamic context parallelism: each document of a global batch is sharded over as many ranks as its
length needs.

megatron-core's scheduler distributes the documents in groups. Every rank computes the same plan, so
nothing is broadcast, and runs its own documents in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mtrain.data.batch import FURTHER
from mtrain.mcore import api as mcore
from mtrain.mcore.layers.padding import padding_is
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import Batch, documents
from mtrain.train.loop.step import Forward, sum_loss
from mtrain.train.objectives import Objective

Groups = list[list[list[int]]]
"""`groups[i][rank]`: the documents that a rank takes part in between two barriers, in order."""


@dataclass(frozen=True)
class Share:
    """A document, and how many ranks it is sharded over."""

    document: dict[str, torch.Tensor]
    ranks: int


def deal_out(lengths: Sequence[int], most: int, ranks: int) -> Groups:
    """Return which ranks share which document; a rank takes at most `most` tokens of one."""
    scheduler = mcore.BalancedCPScheduler(
        most, mcore.parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    # megatron-core's scheduler loses documents if a group cannot hold them: refuse loudly.
    dealt = sorted({number for group in groups for held in group for number in held})
    if dealt != list(range(len(lengths))) or any(not held for group in groups for held in group):
        raise RuntimeError(
            f"{len(lengths)} documents of {sorted(lengths)} tokens cannot be dealt out over {ranks}"
            " ranks"
        )
    return groups  # type: ignore[no-any-return]


def shares(documents: list[dict[str, torch.Tensor]], groups: Groups, rank: int) -> Iterator[Share]:
    """Yield the documents that one rank takes part in, in order."""
    for group in groups:
        for number in group[rank]:
            yield Share(documents[number], sum(number in held for held in group))


def run_documents(
    context: TrainContext,
    batches: Sequence[Batch],
    *,
    forward_only: bool,
    around: Callable[[Forward], Forward] | None = None,
) -> list[torch.Tensor]:
    """Run all documents of the packed samples of a global batch; return what `sum_loss` packs of
    each part that ran here.

    `around` wraps the function that runs one document.
    """
    run = context.run
    world = context.world
    wholes = documents(batches)
    most = run.parallel.max_seqlen_per_dp_cp_rank
    assert most is not None
    groups = deal_out([d["tokens"].shape[1] for d in wholes], most, world.grid.dp)
    mine = shares(wholes, groups, world.coords["dp"])

    def forward(_: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        return _forward(context.objective, next(mine), model)

    reports = mcore.get_forward_backward_func()(
        forward_step_func=around(forward) if around else forward,
        # The schedule writes into these dictionaries; the documents come from `mine`, whose order
        # is that of its calls.
        data_iterator=iter([([{} for _ in wholes], groups)]),
        model=context.state.chunks[0],
        num_microbatches=1,
        seq_length=run.data.length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return [report["metrics"] for report in reports]


def _forward(objective: Objective, share: Share, model: Any) -> tuple[torch.Tensor, Any]:
    document = share.document
    group = None
    if share.ranks > 1:
        group = mcore.parallel_state.get_hybrid_data_context_parallel_groups(group_size=share.ranks)
        # A copy: megatron-core replaces the tensors in the dictionary.
        document = mcore.get_batch_on_this_cp_rank(dict(document), cp_group=group)
    length = share.document["tokens"].shape[1]
    params = mcore.PackedSeqParams(
        qkv_format="sbhd",
        max_seqlen_q=length,
        max_seqlen_kv=length,
        local_cp_size=share.ranks,
        cp_group=group,
    )
    labels = None if objective.reads_logits else document["labels"]
    mask = document["loss_mask"]
    places = document["position_ids"]
    more = {key: document[key] for key in (FURTHER,) if key in document}
    with padding_is(document.get("padding")):
        output = model(
            document["tokens"],
            places,
            None,
            labels=labels,
            loss_mask=mask,
            packed_seq_params=params,
            **more,
        )
    return output, partial(sum_loss, objective, document)
