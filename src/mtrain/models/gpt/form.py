"""What a decoder-only transformer learns from samples: the next token, over documents apart where they are packed."""

from __future__ import annotations

from mtrain.config.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import Form, Packing, next_token


def form(run: RunConfig, splits: Splits, part: str) -> Form:
    """The micro-batches of `part` of the splits."""
    packing = Packing(splits.document_ends, run.data.packed_multiple or 1) if run.data.packed else None
    return next_token(splits.masked_eod, packing)
