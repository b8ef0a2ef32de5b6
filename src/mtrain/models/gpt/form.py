"""What a decoder-only transformer learns from samples: the next token, over documents apart where they are packed."""

from __future__ import annotations

from mtrain.config.run import RunConfig
from mtrain.data import Splits
from mtrain.data.batch import Form, Packing, next_token
from mtrain.data.fim import FillInTheMiddle


def form(run: RunConfig, splits: Splits, part: str) -> Form:
    """The micro-batches of `part` of the splits."""
    data, ends = run.data, splits.document_ends
    packing = Packing(ends, data.packed_multiple or 1) if data.packed else None
    moved = None
    if data.fim.rate and data.fim.ids is not None:
        moved = FillInTheMiddle(data.fim.rate, data.fim.spm_rate, data.fim.ids, ends, run.trainer.seed, part)
    return next_token(splits.masked_eod, packing, moved)
