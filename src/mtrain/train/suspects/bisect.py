"""`bisect`: the cause of an anomalous step of a run, found afterwards from a checkpoint.

The ranks resume, replay up to the step, and compute its gradients with a part of its documents;
healthy samples of the step before take the place of the others. If those are abnormal too, the
weights are at fault. Otherwise halving finds the documents that suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.ckpt import state as ckpt_state
from mtrain.config.resolve.batches import size_after
from mtrain.config.schema.run import RunConfig
from mtrain.data import same_data
from mtrain.data.samples.origin import documents_of, origin, pieces
from mtrain.train.assemble import assemble, splits_of
from mtrain.train.loop import step as steps
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.prefetch import to_device
from mtrain.train.loop.readings import summed_report
from mtrain.train.suspects.halving import smallest
from mtrain.train.suspects.rerun import Start, gradient_norm
from mtrain.train.suspects.tracing import FORMAT, Tracing, write
from mtrain.world.init import joined

DATA = "data"
WEIGHTS = "weights"
NOT_REPRODUCIBLE = "not reproducible"
SHARE = 1 / 3
"""The share of the jump of a number, on a logarithmic scale, that counts as one in a part."""
MOST_ALONE = 64
"""Documents that are tried one by one."""
TRACED = 3
"""Steps before the anomalous one that are a reference for its trace."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a sample of the step."""

    place: int
    """The place of the sample in the step, from 0."""
    begin: int
    end: int
    document: int | None
    """The number of its document in the corpus; None: the whole sample."""


def bisect(
    run: RunConfig, checkpoint: Path | None, step: int, usual: Sequence[float], out: Path
) -> None:
    """Find the cause of the anomaly in a step, on all ranks; rank 0 writes the report into `out`.

    `usual` are the losses of the run before the step.

    Raises:
        CorruptData: the checkpoint or the data is not what was written.
    """
    with joined(run) as world:
        splits = splits_of(run, checkpoint)
        context = assemble(run, world, splits)
        if checkpoint is not None:
            opened = ckpt_state.opened(checkpoint, run, world)
            if not run.checkpoint.accept_changes and "data" in opened.state:
                same_data(opened.state["data"], splits.describe())
            ckpt_state.load(opened, world, context.state, seed=run.trainer.seed)
        begun = context.state.step
        context.begin()
        tracing = Tracing(context, splits, out)
        # The state before the step: later checkpoints have what the anomaly made of it.
        while context.state.step < step - 1:
            if step - context.state.step <= TRACED + 1:
                context.compute = tracing.reference
            steps.train_step(context, stop_requested=False)
        report: dict[str, Any] = {"format": FORMAT, "step": step, "replayed_from": begun}
        report |= _Search(context, usual).result()
        if report["cause"] != NOT_REPRODUCIBLE:
            report["found"] = _traced(context, tracing, compares=report["cause"] == DATA)
        if world.is_rank0:
            write(out, report, context, splits)
        context.close()


def _traced(context: TrainContext, tracing: Tracing, *, compares: bool) -> dict[str, Any] | None:
    """Return the first abnormal output of the whole step; it `compares` with the samples of the
    step before, if those are healthy.
    """
    search = _Search(context, ())
    if compares:
        tracing.reference(context, search.batches([]))
    with tracing.listening():
        steps.gradients(context, search.batches(search.all_pieces()))
    return tracing.found()


class _Search:
    """Computations of a step with a part of its samples."""

    def __init__(self, context: TrainContext, usual: Sequence[float]) -> None:
        self.context = context
        self.usual = usual
        self.factor = context.run.resilience.spike_factor
        self.start = Start.of(context, checks=False)
        self.consumed = context.state.consumed_samples
        self.size = size_after(context.batch_sizes, self.consumed)
        self.samples = context.train_data.samples
        self.width = _size_before(context) if self.consumed else self.size
        """The number of samples that take the place of others."""
        # Those of the step before; in place of those of the first step, of the second.
        self.before = self.consumed - self.width if self.consumed else self.size

    def result(self) -> dict[str, Any]:
        """Return cause, numbers and documents."""
        healthy = self.measured([])
        whole = self.all_pieces()
        full = self.measured(whole)
        found: dict[str, Any] = {"whole": full, "without": healthy, "samples": []}
        middle = float(np.median(self.usual)) if len(self.usual) else math.inf
        if not _finite(healthy) or healthy["loss"] > self.factor * middle:
            why = f"also the samples of the step before have {_words(healthy)}"
            return {**found, "cause": WEIGHTS, "why": why}
        name = _abnormal(full, healthy, self.factor)
        if name is None:
            why = (
                f"replayed, the step has {_words(full)}, and {_words(healthy)} without its samples"
            )
            return {**found, "cause": NOT_REPRODUCIBLE, "why": why}
        # A part of what triggers is less abnormal than all of it.
        limit = healthy[name] * _ratio(full[name], healthy[name]) ** SHARE

        def triggers(part: Sequence[Piece]) -> bool:
            value = self.measured(part)[name]
            return not math.isfinite(value) or value > limit

        kept = smallest(whole, triggers)
        inside = [piece for one in kept for piece in self.pieces_of(one)]
        if len(inside) > len(kept):
            # Where documents are joined that do not belong together, each of them is a surprise:
            # of those that suffice, the worst is named.
            values = [(self.measured([piece])[name], piece) for piece in inside[:MOST_ALONE]]
            value, worst = max(values, key=lambda each: _ratio(each[0], 1.0))
            kept = smallest(inside, triggers) if _ratio(value, 1.0) <= limit else [worst]
        found["samples"] = [self.named(piece) for piece in kept]
        why = f"{len(kept)} of {self.size} samples suffice for the {name}: {_words(full)}"
        return {**found, "cause": DATA, "why": why}

    def all_pieces(self) -> list[Piece]:
        """Return the whole samples of the step."""
        width = self.context.run.data.length + 1
        return [Piece(place, 0, width, None) for place in range(self.size)]

    def pieces_of(self, whole: Piece) -> list[Piece]:
        """Return the documents of a sample, where their tokens are known."""
        cut = pieces(self.samples, self.consumed + whole.place)
        return [Piece(whole.place, *each) for each in cut] or [whole]

    def named(self, piece: Piece) -> dict[str, Any]:
        """Return the sample and the documents of a piece, as a report has them."""
        number = self.consumed + piece.place
        corpus, documents = documents_of(self.samples, number)
        place = origin(self.samples, number)
        if piece.document is not None:
            documents = [piece.document]
            place = f"{corpus}: document {piece.document}"
        return {"sample": number, "corpus": corpus, "documents": documents, "place": place}

    def batches(self, kept: Sequence[Piece]) -> list[Any]:
        """Return this rank's micro-batches with the tokens of `kept`, and others elsewhere."""
        data = self.context.train_data
        numbers = data.numbers(self.consumed, self.size)
        places = numbers - self.consumed
        whole = {piece.place for piece in kept if piece.document is None}
        others = self.before + places % self.width
        chosen = np.where(np.isin(places, list(whole)), numbers, others)

        def changed(windows: np.ndarray) -> np.ndarray:
            flat = places.ravel().tolist()
            for piece in kept:
                if piece.document is not None and piece.place in flat:
                    own = self.samples.batch(np.array([self.consumed + piece.place]))[0]
                    row = windows[flat.index(piece.place)]
                    row[piece.begin : piece.end] = own[piece.begin : piece.end]
            return windows

        return [to_device(each, self.context.world) for each in data.made_of(chosen, changed)]

    def measured(self, kept: Sequence[Piece]) -> dict[str, float]:
        """Return the loss and the gradient norm of the step with the tokens of `kept`."""
        context = self.context
        self.start.restore(context)
        reports = steps.gradients(context, self.batches(kept))
        row = summed_report(context.world, context.table, reports, {})
        loss = context.table.divided(row.tolist())["loss"]
        return {"loss": loss, "gradient norm": gradient_norm(context)}


def _size_before(context: TrainContext) -> int:
    """Return the samples of the step before."""
    consumed = 0
    while True:
        size = size_after(context.batch_sizes, consumed)
        if consumed + size >= context.state.consumed_samples:
            return size
        consumed += size


def _abnormal(full: dict[str, float], healthy: dict[str, float], factor: float) -> str | None:
    """Return the number of a step that is abnormal, the one that is further off; None: none is."""
    ratios = {name: _ratio(full[name], healthy[name]) for name in full}
    name = max(ratios, key=lambda each: ratios[each])
    return name if ratios[name] > factor else None


def _ratio(value: float, usual: float) -> float:
    return value / max(usual, 1e-30) if math.isfinite(value) else math.inf


def _finite(values: dict[str, float]) -> bool:
    return all(map(math.isfinite, values.values()))


def _words(values: dict[str, float]) -> str:
    return " and ".join(f"the {name} {value:.4g}" for name, value in values.items())
