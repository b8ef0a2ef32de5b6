"""A record of a layout's results, for comparison with another layout; the documents of packed
samples are run one by one as the reference of a packed run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from mtrain import strict_json
from mtrain.ckpt import state as ckpt_state
from mtrain.ckpt import store
from mtrain.ckpt.folder import CRITIC, MODEL, folder_name
from mtrain.config.resolve.batches import size_after
from mtrain.config.schema.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import FURTHER, GlobalBatches
from mtrain.mcore import api as mcore
from mtrain.mcore.state import sharding
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import documents, to_device
from mtrain.train.loop.step import (
    Batch,
    forward_step,
    gradients,
    reduce_report,
    taught,
    train_step,
)
from mtrain.train.trace.activations import Recorder
from mtrain.world.init import World, joined

SMALL = 1e-3
STEPS = "steps.json"
DOCUMENTS = "documents.json"
OF_CRITIC = "gradients_of_critic"
MIDDLE = "middle"
RESTORED = "restored"
"""Folders of the checkpoint that a run resumes from, and of its state once that is read."""


def observe(
    run: RunConfig,
    folder: Path,
    *,
    by_document: bool = False,
    resumed: bool = False,
    traced: bool = False,
) -> None:
    """Train `run` to its end on this rank, and leave in `folder`: losses and norms of each step,
    the whole gradient that the first update was made from, and the weights after the last.

    Of packed samples also the loss and the gradient of a few single documents. With `by_document`
    nothing is packed: one rank runs each document as a sequence of its own. With `resumed` the
    second half of the steps is made by what was built anew and read back from a checkpoint. With
    `traced`, the inputs and outputs of every module are kept, and the gradient and the weights of
    every step, for `first_divergence`; single documents are not observed.
    """
    with joined(run) as world:
        splits = splits_of(run)
        context = _assembled(run, world, splits, by_document)
        of_documents = _documents(context, folder) if run.data.packed and not traced else []
        recorder = Recorder(context, by_document=by_document) if traced else None
        record_gradients(context, folder / "gradients")
        if context.critic is not None:
            record_gradients(context.critic, folder / OF_CRITIC)
        results = []
        for made in range(run.trainer.steps):
            # Half of the steps before, half after: errors of a resume show in the second half.
            if resumed and made and made == run.trainer.steps // 2:
                context = _resumed(context, folder / MIDDLE, splits, by_document)
                if recorder is not None:
                    recorder.follow(context)
                    ckpt_state.save(folder / RESTORED, run, world, context.state, {})
            if traced:
                record_gradients(context, folder / f"gradients_{made + 1}")
            results.append(train_step(context, stop_requested=False))
            if traced:
                ckpt_state.save(folder / f"weights_{made + 1}", run, world, context.state, {})
        ckpt_state.save(folder, run, world, context.state, {})
        if recorder is not None:
            recorder.save(folder)
        if world.is_rank0:
            rows = [{"loss": r.loss, "grad_norm": r.grad_norm} for r in results]
            (folder / STEPS).write_text(strict_json.dumps(rows))
            (folder / DOCUMENTS).write_text(strict_json.dumps(of_documents))


def _assembled(run: RunConfig, world: World, splits: Splits, by_document: bool) -> TrainContext:
    context = assemble(run, world, splits)
    if by_document:
        context.schedule = alone(splits.document_ends)
    return context


def _resumed(
    context: TrainContext, folder: Path, splits: Splits, by_document: bool
) -> TrainContext:
    """Save the run, build everything anew, and return it restored from that checkpoint."""
    run = context.run
    world = context.world
    path = ckpt_state.save(folder, run, world, context.state, {})
    context.close()
    anew = _assembled(run, world, splits, by_document)
    ckpt_state.load(ckpt_state.opened(path, run, world), world, anew.state, seed=run.trainer.seed)
    return anew


def _documents(context: TrainContext, folder: Path) -> list[dict[str, Any]]:
    """Return places and losses of some documents of the first batch; save their gradients."""
    data = context.train_data
    size = size_after(context.batch_sizes, 0)
    out = []
    for document in observed(data, size):
        batches = [to_device(batch, context.world) for batch in only(document, data, size)]
        reports = gradients(context, batches)
        means = reduce_report(context.world, context.table, reports, False)
        save_gradients(context, folder / f"document_{document.number}")
        out.append({**asdict(document), "loss": means["loss"], "tokens": int(means["tokens"])})
    return out


def record_gradients(context: TrainContext, folder: Path) -> None:
    """Save the gradients that the optimizer's next step finds, as a checkpoint of step 0."""
    optimizer = context.state.optimizer
    step = optimizer.step

    def recording() -> Any:
        optimizer.step = step
        save_gradients(context, folder)
        return step()

    optimizer.step = recording


def save_gradients(context: TrainContext, folder: Path) -> None:
    """Save the current gradients as a checkpoint of step 0."""
    # In the format of checkpoints, which assembles tensors of any layout.
    ranks = ckpt_state.meeting_of(context.world, context.run)
    shards = sharding.gradient_shards(context.state.chunks, context.state.optimizer)
    store.save(folder, 0, shards, {}, {}, "", ranks)


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint put together from its pieces, by name."""
    opened = store.Checkpoint.open(checkpoint)
    return {key: opened.whole(key) for key in opened.manifest["tensors"]}


@dataclass(frozen=True)
class Row:
    """The largest relative difference of one kind of number, and where it was found."""

    what: str
    error: float
    where: str
    tolerance: float

    @property
    def equal(self) -> bool:
        """Return whether it is within its tolerance."""
        return self.error <= self.tolerance


def compare(
    one: Path, many: Path, steps: int, tolerances: dict[str, float], *, zero_centered: bool = False
) -> list[Row]:
    """Compare two layouts' records of `observe`: losses, norm and gradients of the first step,
    weights after the last.

    With `zero_centered` norms, the factor is compared, which is the weight plus 1: the weight
    itself is almost zero after a few steps.
    """
    a, b = (json.loads((folder / STEPS).read_text()) for folder in (one, many))
    losses = {
        f"step {i}": relative(x["loss"], y["loss"])
        for i, (x, y) in enumerate(zip(a, b, strict=True), 1)
    }
    norm = {"step 1": relative(a[0]["grad_norm"], b[0]["grad_norm"])}
    rows = [
        _worst("loss", losses, tolerances["loss"]),
        _worst("gradient norm", norm, tolerances["gradient norm"]),
    ]
    rows += _of_documents(one, many, tolerances)
    if (one / OF_CRITIC).exists():
        errors = _of_tensors(*(folder / OF_CRITIC / folder_name(0) for folder in (one, many)))
        rows.append(_worst("gradient of the critic", errors, tolerances["gradient"]))
    for what, inside in (
        ("gradient", f"gradients/{folder_name(0)}"),
        ("weight", folder_name(steps)),
    ):
        errors = _of_tensors(one / inside, many / inside, offset=what == "weight" and zero_centered)
        rows.append(_worst(what, errors, tolerances[what]))
    return rows


def _of_documents(one: Path, many: Path, tolerances: dict[str, float]) -> list[Row]:
    """Return losses and gradients of documents of packed samples, if there are any."""
    a, b = (json.loads((folder / DOCUMENTS).read_text()) for folder in (one, many))
    losses: dict[str, float] = {}
    errors: dict[str, float] = {}
    for x, y in zip(a, b, strict=True):
        where = f"document {x['number']}, in sample {x['sample']}"
        same = all(x[key] == y[key] for key in ("number", "start", "stop", "tokens"))
        losses[where] = relative(x["loss"], y["loss"]) if same else float("inf")
        inside = f"document_{x['number']}/{folder_name(0)}"
        # a token that attends only to itself gives norms of queries a gradient of rounding errors
        differences = _of_tensors(one / inside, many / inside, small=SMALL)
        errors |= {f"{where}: {key}": error for key, error in differences.items()}
    if not losses:
        return []
    return [
        _worst("loss of a document", losses, tolerances["loss"]),
        _worst("its gradient", errors, tolerances["gradient"]),
    ]


def _of_tensors(
    one: Path, many: Path, *, offset: bool = False, small: float = 0.0
) -> dict[str, float]:
    """Return the relative difference of each tensor of two checkpoints; with `offset`, of norms
    that are 1 more.

    A tensor whose norm is less than `small` of that of all tensors is compared with that.
    """
    left, right = (
        {
            key.removeprefix(MODEL): value
            for key, value in whole_tensors(folder).items()
            if is_weight(key)
        }
        for folder in (one, many)
    )
    # A weight that one side lacks cannot be compared: infinite.
    if left.keys() != right.keys():
        odd = sorted(left.keys() ^ right.keys())
        return {f"only on one side: {', '.join(odd[:3])}": float("inf")}
    factors = {key for key in left if offset and "norm" in key and "bias" not in key}
    # A tensor that is almost zero would be compared by its rounding errors.
    least = small * math.sqrt(sum(float(value.double().square().sum()) for value in left.values()))
    return {
        key: _distance(value, right[key], 1.0 if key in factors else 0.0, least)
        for key, value in left.items()
    }


def is_weight(key: str) -> bool:
    """Return whether a key is a weight's or gradient's: not the optimizer's or a counter's."""
    return key.startswith((MODEL, CRITIC + MODEL)) and "tokens_per_expert" not in key


def relative(a: float | None, b: float | None) -> float:
    """Return the difference of two numbers over the first; infinite if one is not a number."""
    if a is None or b is None:  # not a number
        return float("inf")
    return abs(a - b) / max(abs(a), 1e-12)


def _distance(a: torch.Tensor, b: torch.Tensor, offset: float, least: float) -> float:
    return float(
        (a.double() - b.double()).norm() / (a.double() + offset).norm().clamp_min(max(least, 1e-12))
    )


def _worst(what: str, errors: dict[str, float], tolerance: float) -> Row:
    where = max(errors, key=lambda key: errors[key])
    return Row(what, errors[where], where, tolerance)


MOST_OBSERVED = 3


def run_alone(
    context: TrainContext, batches: Sequence[Batch], *, forward_only: bool, ends: Sequence[int] = ()
) -> list[torch.Tensor]:
    """Run every document as a sequence of its own, on one rank, without any packing; see
    `run_schedule`.

    `ends` are the tokens that end a document: there each is cut, begins at position 0 and has no
    loss at its end, whatever the packed batches contain.
    """
    parts = taught(context, [part for whole in documents(batches) for part in _parted(whole, ends)])
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
    """Return the weights of further tokens [1, length, depths], none after the document."""
    length, depths = further.shape[1:]
    left = length - 1 - torch.arange(length)
    return further * (left[:, None] >= torch.arange(1, depths + 1))


@dataclass(frozen=True)
class Observed:
    """A document of the first global batch: its tokens `start` to `stop` of joined samples."""

    number: int
    sample: int
    start: int
    stop: int


def observed(data: GlobalBatches, size: int) -> list[Observed]:
    """Return a few documents with a loss of the first `size` samples, alike on every rank."""
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
    """Return this rank's micro-batches of the first step, with one document's loss only."""
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
