"""Data: `prepare` makes tokens of a corpus once, `open_splits` computes which tokens make a sample.

The launcher calls `prepare` before it starts ranks; each rank calls `open_splits` and reads for
itself. Only `mtrain.data.batch` imports torch.
"""

from __future__ import annotations

from mtrain.data.chats.samples import ChatSamples, PairSamples, PromptSamples
from mtrain.data.image_text import ImageTextSamples
from mtrain.data.samples.token_stream import Samples
from mtrain.data.samples.whole_documents import BlendOfDocuments, WholeDocuments
from mtrain.data.splits import (
    Splits,
    open_splits,
    prepare,
    prepare_for_model,
    same_data,
    validation_of,
)
from mtrain.data.store.corpus import Corpus, verify

__all__ = [
    "BlendOfDocuments",
    "ChatSamples",
    "Corpus",
    "ImageTextSamples",
    "PairSamples",
    "PromptSamples",
    "Samples",
    "Splits",
    "WholeDocuments",
    "open_splits",
    "prepare",
    "prepare_for_model",
    "same_data",
    "validation_of",
    "verify",
]
