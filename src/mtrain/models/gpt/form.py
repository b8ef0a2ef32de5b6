"""What a decoder-only transformer learns from samples: the next token, over documents apart where they are packed,
and of chats what is learned of them.
"""

from __future__ import annotations

from mtrain.config.run import RunConfig
from mtrain.data import ChatSamples, Splits
from mtrain.data.batch import Form, Packing, next_token
from mtrain.data.chat_batch import of_chats


def form(run: RunConfig, splits: Splits, part: str) -> Form:
    """The micro-batches of `part` of the splits."""
    source = getattr(splits, part)
    if isinstance(source, ChatSamples):
        return of_chats(source)
    packing = Packing(splits.document_ends, run.data.packed_multiple or 1) if run.data.packed else None
    return next_token(splits.masked_eod, packing)
