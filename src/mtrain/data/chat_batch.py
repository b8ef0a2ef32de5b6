"""Micro-batches of chats and of whole documents, as torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from mtrain.data.batch import Collator, MicroBatch
from mtrain.data.chat_samples import NOTHING, ChatSamples, Sample
from mtrain.data.whole_documents import BlendOfDocuments, WholeDocuments


def of_chats(source: ChatSamples) -> Collator:
    """Return each token that is learned is predicted from those before it in its chat.

    Packed chats do not see each other, each from position 0, and what pads a sample is a document
    of its own.
    """

    def form(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        return batch_of(
            [source.sample(number) for number in numbers], packed=source.multiple is not None
        )

    return form


def of_documents(
    source: WholeDocuments | BlendOfDocuments, masked_eod: int | None = None
) -> Collator:
    """Return each token of a document is predicted from those before it, which begin at position 0.

    What pads a sample is a document of its own. No loss counts for the prediction that follows
    `masked_eod`.
    """

    def form(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        batch = batch_of([source.sample(number) for number in numbers], packed=True)
        if masked_eod is not None:
            batch["loss_mask"][batch["tokens"] == masked_eod] = 0.0
        return batch

    return form


def batch_of(samples: list[Sample], *, packed: bool) -> MicroBatch:
    """Return samples [n, seq_length], or as one row [1, n * seq_length] of documents."""
    found = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    ids = found.clamp(min=0)
    learned = torch.from_numpy(np.stack([sample.learned for sample in samples]))
    length = ids.shape[1] - 1
    batch = MicroBatch(
        tokens=ids[:, :-1].contiguous(),
        labels=ids[:, 1:].contiguous(),
        loss_mask=learned[:, 1:].float().contiguous(),
        position_ids=torch.arange(length).expand(len(ids), length).contiguous(),
        padding=(found[:, :-1] == NOTHING).contiguous(),
    )
    if not packed:
        return batch
    starts = [row * length + start for row, sample in enumerate(samples) for start in sample.starts]
    bounds = torch.tensor([*starts, len(samples) * length], dtype=torch.int32)
    begins = bounds[:-1].long().repeat_interleave(bounds.diff().long())
    return MicroBatch(
        tokens=batch["tokens"].view(1, -1),
        labels=batch["labels"].view(1, -1),
        loss_mask=batch["loss_mask"].view(1, -1),
        position_ids=(torch.arange(len(begins)) - begins).unsqueeze(0),
        cu_seqlens=bounds,
        padding=batch["padding"].view(1, -1),
    )
