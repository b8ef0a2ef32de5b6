"""Counts of a micro-batch: its predictions, and the tokens of its documents without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mtrain.config.resolve.defaults import CHATS
from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import FURTHER
from mtrain.plan.count import flops_of_token

TALLY = "tally"
"""Key of a micro-batch on the host: its `Tally`, which context parallelism does not split."""


def may_pad(run: RunConfig) -> bool:
    """Return whether samples may have positions that hold no token."""
    d = run.data
    return (
        d.kind in (*CHATS, "image_text")
        or d.whole_documents
        or (d.packed and (d.packed_multiple or 1) > 1)
    )


@dataclass(frozen=True)
class Tally:
    """The counts of a micro-batch before context parallelism splits it."""

    losses: float
    """Divisor of the sum of losses."""
    further: tuple[float, ...]
    """Divisors for each token that is predicted after the next one."""
    rows: int
    """Samples, or rows of packed ones."""
    tokens: np.ndarray | None
    """Tokens of each document, or of each row, int64; None: every row is a whole sample."""

    def lengths(self, length: int) -> np.ndarray:
        """Return tokens of each document, or of each row, where a whole sample has `length`; int64,
        none is 0.
        """
        return np.full(self.rows, length, np.int64) if self.tokens is None else self.tokens


def tally_of(batch: Mapping[str, Any], bounds: Sequence[int] | None) -> Tally:
    """Return the counts of a micro-batch whose packed documents begin at `bounds`; None: it is not
    packed.
    """
    counts = batch.get("loss_counts", batch["loss_mask"])
    # no depths without multi-token prediction: an array without columns has no sums
    further = batch[FURTHER].flatten(0, 1).numpy() if FURTHER in batch else np.zeros((1, 0))
    depths = further.astype(np.float64).sum(axis=0).round()
    losses = counts.numpy().astype(np.float64).sum()
    return Tally(
        float(losses), tuple(depths.tolist()), len(batch["tokens"]), _lengths(batch, bounds)
    )


def _lengths(batch: Mapping[str, Any], bounds: Sequence[int] | None) -> np.ndarray | None:
    padding = batch.get("padding")
    there = None if padding is None else ~padding.numpy()
    if bounds is not None:
        # One pass over the tokens: the prefix sum at a document's bounds gives its tokens.
        flat = np.ones(bounds[-1], np.int64) if there is None else there.reshape(-1)
        before = np.concatenate([[0], flat.cumsum()])
        tokens = before[bounds[1:]] - before[bounds[:-1]]
    elif there is not None:
        tokens = there.sum(axis=1)
    else:
        return None
    # A document of padding only has no tokens, and no FLOPs.
    return np.asarray(tokens[tokens > 0], np.int64)


class Flops:
    """Model FLOPs of documents, each as long as it is."""

    def __init__(self, run: RunConfig) -> None:
        self._length = run.data.length
        self._of_token = cache(lambda length, causal: flops_of_token(run, length, causal=causal))

    def of(self, tallies: Iterable[Tally]) -> tuple[float, float, float]:
        """Return tokens of all documents, and the model FLOPs of their forward and backward, with
        half of attention and with all of it.
        """
        lengths = np.concatenate(
            [np.zeros(0, np.int64), *(tally.lengths(self._length) for tally in tallies)]
        )
        # FLOPs depend on the length only, and a step has few different lengths.
        sizes, many = np.unique(lengths, return_counts=True)
        tokens = sizes * many
        causal, full = (
            float(
                sum(
                    count * self._of_token(size, half)
                    for size, count in zip(sizes.tolist(), tokens, strict=True)
                )
            )
            for half in (True, False)
        )
        return float(tokens.sum()), causal, full
